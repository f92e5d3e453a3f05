"""The server's side of lanes: takes connections, finishes handshakes, gives lanes to their user."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc

from split.lane.half_open import AnsweredHandshakes, SilentStreams, host_of
from split.lane.lane import Lane
from split.lane.transport import (
    CLOSE_SECONDS,
    HANDSHAKE_SECONDS,
    METHOD,
    SERVICE,
    SILENT_SECONDS,
    refusal_details,
    server_options,
    wire_bytes,
)
from split.protocol.errors import HandshakeError, LaneError, Refusal, refused
from split.protocol.frames import Limits
from split.protocol.handshake import ServerHandshake
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity, TicketBook

_LOG = logging.getLogger(__name__)
_HALF_OPEN = 32  # streams without a message, and as many handshakes that wait for their third
_OF_ONE_IDENTITY = 4  # of the latter
_LOG_SECONDS = 10.0


class LaneServer:
    """Listens for lanes.

    Args:
        listen: host and port; port 0 takes a free one.
        keys: the server's key pair.
        tickets: who may open a lane.
        limits: what the client of a lane may send.
        on_lane: serves a lane; it is called in the lane's own thread, and when it returns the
            lane is closed.
        maximum_lanes: how many there may be at once.

    Raises:
        OSError: the address can't be listened on.

    """

    def __init__(
        self,
        listen: str,
        keys: ServerKeys,
        tickets: TicketBook,
        limits: Callable[[Identity], Limits],
        on_lane: Callable[[Lane], None],
        maximum_lanes: int = 64,
    ) -> None:
        self._keys = keys
        self._tickets = tickets
        self._limits = limits
        self._on_lane = on_lane
        self._silent = SilentStreams(_HALF_OPEN, SILENT_SECONDS)
        self._answered = AnsweredHandshakes(_HALF_OPEN, _OF_ONE_IDENTITY, HANDSHAKE_SECONDS)
        self._maximum_lanes = maximum_lanes
        self._lock = threading.Lock()
        self._threads: dict[Lane, threading.Thread] = {}
        self._stopping = False
        self._refusals = 0  # that are not in the log yet
        self._next_line = 0.0
        # Those that have just lost their place are still there for a moment.
        calls = maximum_lanes + 3 * _HALF_OPEN
        self._server = grpc.server(
            _ThreadPerCall(),
            options=server_options(calls),
            maximum_concurrent_rpcs=calls,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._open)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(
                f"the block server can't listen on {listen}: the port is in use, or the address "
                "is not one of this machine; change split.listen"
            )
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Begin to take lanes."""
        self._server.start()
        _LOG.info("the block server listens on %s", self.address)

    def stop(self) -> None:
        """Take no more lanes, end those there are, and wait for their threads, for a while."""
        with self._lock:
            self._stopping = True
            threads = dict(self._threads)
        for lane in threads:
            lane.close("the server has stopped")
        self._server.stop(CLOSE_SECONDS).wait(2 * CLOSE_SECONDS)
        for thread in threads.values():
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one call, in the thread that becomes its lane's writer."""
        try:
            lane = yield from self._shake_hands(requests, context)
        except HandshakeError as error:
            self._note_refusal(error)
            code = grpc.StatusCode.UNAUTHENTICATED
            if error.refusal is Refusal.BUSY:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            context.abort(code, refusal_details(error.refusal))
        if not context.add_callback(lane.over):
            lane.over()
        lane.start(requests)
        yield from lane.messages()

    def _shake_hands(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, Lane]:
        """Take M1, give M2, take M3, within limits of number and time."""
        handshake = ServerHandshake(self._keys, self._tickets)
        with self._silent.place(host_of(context.peer()), context.cancel):
            self._check_room()
            hello = _next(requests)
        answer = handshake.answer(hello)
        with self._answered.place(handshake.identity, context.cancel):
            yield answer
            finished = _next(requests)
            carried = (wire_bytes(answer), wire_bytes(hello) + wire_bytes(finished))
            with self._lock:
                self._check_room()
                secrets, identity = handshake.accept(finished)
                lane = Lane(
                    identity, secrets, self._limits(identity), False, carried, context.cancel
                )
                thread = threading.Thread(
                    target=self._serve, args=(lane,), name=f"serve {identity.node}", daemon=True
                )
                self._threads[lane] = thread
                thread.start()
        return lane

    def _note_refusal(self, error: HandshakeError) -> None:
        """Log refusals, but no faster than now and then: anybody can have as many as they like."""
        with self._lock:
            self._refusals += 1
            if time.monotonic() < self._next_line:
                return
            count, self._refusals = self._refusals, 0
            self._next_line = time.monotonic() + _LOG_SECONDS
        _LOG.info("handshakes refused since the last such line: %d; this one: %s", count, error)

    def _check_room(self) -> None:
        if self._stopping or len(self._threads) >= self._maximum_lanes:
            raise refused(Refusal.BUSY)

    def _serve(self, lane: Lane) -> None:
        """Let the lane's user serve it."""
        _LOG.info("%r opened", lane)
        try:
            self._on_lane(lane)
        except LaneError as error:
            lane.close(str(error))
        except Exception as error:
            _LOG.exception("serving %r failed", lane)
            lane.close(f"the server failed ({type(error).__name__})")
        finally:
            lane.close()
            with self._lock:
                del self._threads[lane]


class _ThreadPerCall(Executor):
    """Gives each call a thread of its own. A pool would keep those of a flood for ever."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a new thread."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name="lane writer", daemon=True).start()
        return future


def _next(requests: Iterator[bytes]) -> bytes:
    message = next(requests, None)
    if message is None:
        raise refused(Refusal.MALFORMED)
    return message
