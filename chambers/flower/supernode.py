"""``chambers-supernode``: Flower's SuperNode, which returns after any failure of a connection.

Flower's SuperNode stops working for good, while its process and its health check continue, after
any error whose text contains "ssl" or "tls": a connection that is closed within a TLS handshake is
enough. It waits two hours for a message whose objects were announced, but never sent, and forever
for the reply of an app whose task has ended without one.
"""

import os
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from logging import ERROR
from typing import Any, NoReturn

import httpx
from flwr.common import log
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.retry.http_retry import make_simple_http_retry_invoker
from flwr.supercore.retry.retry_invoker import RetryInvoker, RetryState
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode import main as supernode
from flwr.supernode.cli.flower_supernode import flower_supernode
from flwr.supernode.main import create_app as flower_app
from flwr.supernode.nodestate import in_memory_nodestate, nodestate_factory
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

# Seconds without a new object after which a message is given up.
PULL_SECONDS = 30.0
# Seconds after the SuperLink's last answer at which the SuperNode is offline, as the SuperLink
# decides after two missing heartbeats.
OFFLINE_SECONDS = 60.0
# EX_TEMPFAIL in sysexits.h: a supervisor should start the program again.
_TRY_AGAIN = 75


class Contact:
    """The SuperLink's last answer, as Unix time in seconds."""

    last = time.time()

    @classmethod
    def note(cls) -> None:
        """Record an answer."""
        cls.last = time.time()


def make_retry_invoker() -> RetryInvoker:
    """Return Flower's invoker, which also retries after a connection that failed within TLS.

    A certificate that can't be verified is still a permanent error.
    """
    invoker = make_simple_http_retry_invoker()
    gives_up, succeeded = invoker.should_giveup, invoker.on_success

    def on_success(state: RetryState) -> None:
        Contact.note()
        if succeeded:
            succeeded(state)

    def should_give_up(error: Exception) -> bool:
        if isinstance(error, httpx.TransportError):
            return any(isinstance(e, ssl.SSLCertVerificationError) for e in _causes(error))
        return bool(gives_up and gives_up(error))

    invoker.should_giveup, invoker.on_success = should_give_up, on_success
    return invoker


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def pull_objects(
    object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any
) -> dict[str, bytes]:
    """Pull the objects of a message, as Flower does.

    Raise ``ObjectPullError`` if an object isn't available and no other has arrived for
    ``PULL_SECONDS``.
    """
    last = time.monotonic()

    def pull(identifier: str) -> bytes:
        nonlocal last
        try:
            content = pull_object_fn(identifier)
        except inflatable_utils.ObjectUnavailableError:
            if time.monotonic() - last > PULL_SECONDS:
                reason = f"no object of the message has arrived for {PULL_SECONDS:g} s"
                raise inflatable_utils.ObjectPullError(identifier, reason) from None
            raise
        last = time.monotonic()
        return content

    return inflatable_utils.pull_objects(object_ids, pull, **options)


class Heartbeat(heartbeat.HeartbeatSender):
    """Flower's heartbeats; if they fail with an unexpected error, the process ends."""

    def __init__(self, beat: Callable[[], bool]) -> None:
        def noting() -> bool:
            succeeded = beat()
            if succeeded:
                Contact.note()
            return succeeded

        super().__init__(noting)

    def _run(self) -> None:
        try:
            super()._run()
        except Exception as error:
            _end(f"heartbeats have ended: {error}")


class NodeState(in_memory_nodestate.InMemoryNodeState):
    """Flower's state of a SuperNode; a task that ends without a reply is answered with an error."""

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task, and answer the messages that it has received and not answered."""
        finished = super().finish_task(task_id, sub_status, details)
        for task in self.get_tasks(task_ids=[task_id]) if finished else ():
            if task.type == TaskType.CLIENT_APP:
                error = in_memory_nodestate.CLIENT_APP_CRASHED_ERROR
                self._store_error_replies({task.run_id}, error)
        return finished


def create_app(*arguments: Any, **options: Any) -> Starlette:
    """Create Flower's HTTP application, whose health check fails while the SuperNode is offline."""

    async def tell(request: Request, call_next: RequestResponseEndpoint) -> Response:
        if request.url.path == "/health" and time.time() - Contact.last > OFFLINE_SECONDS:
            since = datetime.fromtimestamp(Contact.last, UTC).isoformat(timespec="seconds")
            return JSONResponse({"offline-since": since}, 503)
        return await call_next(request)

    app: Starlette = flower_app(*arguments, **options)
    app.add_middleware(BaseHTTPMiddleware, dispatch=tell)
    return app


def main() -> NoReturn:
    """Run the SuperNode with Flower's options; end the process when its loop ends."""
    connection: Any = fleet_http_connection
    connection.make_simple_http_retry_invoker = make_retry_invoker
    connection.HeartbeatSender = Heartbeat
    client: Any = start_client_internal
    client.pull_objects = pull_objects
    states: Any = nodestate_factory
    states.InMemoryNodeState = NodeState
    application: Any = supernode
    application.create_app = create_app
    flower_supernode()
    _end("the connection to the SuperLink has ended")


def _end(reason: str) -> NoReturn:
    # Flower's HTTP server would keep the process alive.
    log(ERROR, "%s; the SuperNode ends, so that it is started again", reason)
    os._exit(_TRY_AGAIN)
