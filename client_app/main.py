"""The ClientApp: pass messages to the institution's resident worker, or answer them directly.

A deployment starts a process for each message. This module doesn't import PyTorch, so that such a
process starts quickly if a worker answers the message.
"""

from contextlib import suppress
from logging import INFO, WARNING
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common import log
from google.protobuf.message import EncodeError

from client_app.code_digest import code_digest
from client_app.worker_socket import (
    MAX_TEXT,
    TRANSFER_SECONDS,
    WorkerError,
    connected_worker,
    receive_frame,
    send_frame,
)
from federation.flower_internals import (
    MessageProto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from federation.run_config import ConfigError, parse_run_config
from federation.site_file import own_settings
from federation.site_policy import PolicyError

app = ClientApp()


class FailedInWorkerError(Exception):
    """The worker raised an exception, of which it reports only the class name."""


class WorkerEndedError(Exception):
    """The worker ended while answering a message.

    The message is not answered again: its invitation to a lane may have been used, and the site
    has already counted the message.
    """


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answer a message through the worker that the site file names, or in this process."""
    path = ""
    with suppress(PolicyError):  # the handlers reply with this error
        site = own_settings({}, deployed=False)
        path = str(site.get("worker", ""))
    if path:
        try:
            return _ask_worker(Path(path), message, context)
        except WorkerError as error:
            log(WARNING, "the worker at %s %s; this process answers the message", path, error)
    from client_app.handlers import app as handlers

    return handlers(message, context)


def _ask_worker(path: Path, message: Message, context: Context) -> Message:
    """Send a message to the worker and wait for the reply.

    Raise ``WorkerError`` if there is no worker, or it refused or could not receive the message.
    Raise ``WorkerEndedError`` if the worker ended after receiving the message. Raise
    ``FailedInWorkerError`` if the message's handler raised an exception. Raise ``TimeoutError`` if
    the worker didn't answer within the time that the server waits.
    """
    with connected_worker(path) as connection:
        try:
            with suppress(BrokenPipeError):  # the worker may have refused and disconnected
                send_frame(connection, code_digest().encode())
            refusal = receive_frame(connection, MAX_TEXT).decode(errors="replace")
            if refusal:
                raise WorkerError(refusal)
            send_frame(connection, message_to_proto(message).SerializeToString())
            send_frame(connection, context_to_proto(context).SerializeToString())
        except (OSError, EncodeError) as error:
            raise WorkerError(f"did not receive the message: {error}") from error
        log(INFO, "the worker at %s answers the message", path)
        connection.settimeout(_time_limit(context))
        try:
            problem = receive_frame(connection, MAX_TEXT).decode(errors="replace")
            reply = receive_frame(connection)
        except ConnectionError as error:
            raise WorkerEndedError(
                f"the worker ended before it had answered ({error}); perhaps it ran out of memory"
            ) from error
    if problem:
        raise FailedInWorkerError(problem)
    return message_from_proto(MessageProto.FromString(reply))


def _time_limit(context: Context) -> float:
    """Return the seconds that the server waits for a reply, including a late one."""
    try:
        config = parse_run_config(context.run_config)
        return config.reply_timeout * (1 + config.late_replies)
    except ConfigError:  # the worker will reply with this error at once
        return TRANSFER_SECONDS
