"""The resident worker: a process that answers messages and keeps the model and data in memory.

    CHAMBERS_SITE=/srv/chambers/site.toml python -m client_app.worker [--allow-uid UID]

``chambers site worker`` starts this program, which listens at the socket in the site file. The
worker answers one message at a time; meanwhile it refuses other messages, so their ClientApp
processes answer them. If the caller ends before receiving its reply, the worker exits with status
75, since this is the only reliable way to stop all computations of a message. It also exits with
this status after a GPU kernel has failed, because no other kernel could run. A supervisor such as
systemd then restarts the worker.
"""

import argparse
import os
import selectors
import signal
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from logging import DEBUG, ERROR, INFO, WARNING
from pathlib import Path
from threading import Thread
from typing import NoReturn

from filelock import FileLock, Timeout
from flwr.clientapp import ClientApp
from flwr.common import log

from client_app.code_digest import code_digest
from client_app.worker_socket import (
    TRANSFER_SECONDS,
    WorkerError,
    peer_uid,
    receive_frame,
    refuse_open_folder,
    send_frame,
)
from federation.flower_internals import (
    ContextProto,
    MessageProto,
    context_from_proto,
    message_from_proto,
    message_to_proto,
)
from federation.site_file import VARIABLE, own_settings
from federation.site_policy import PolicyError

# Exit status if a supervisor should start the worker again: EX_TEMPFAIL in sysexits.h.
TRY_AGAIN = 75


class Worker:
    """Server that answers messages on a listening socket, one at a time.

    ``uids`` are the ids of the users whose processes may connect.
    """

    def __init__(self, listener: socket.socket, uids: Collection[int]) -> None:
        self._listener = listener
        self._uids = uids
        self._code = code_digest()
        self._run: int | None = None

    def serve(self) -> NoReturn:
        """Serve callers until the process ends."""
        from client_app.handlers import app

        log(INFO, "the worker runs the code with digest %.16s", self._code)
        while True:
            caller, _ = self._listener.accept()
            with caller:
                caller.settimeout(TRANSFER_SECONDS)
                try:
                    self._answer(caller, app)
                except ConnectionError as error:  # health checks send no message
                    log(DEBUG, "a caller disconnected before its message was complete: %s", error)
                except Exception as error:  # continue with the next caller
                    log(ERROR, "a message could not be received or answered", exc_info=error)

    def _answer(self, caller: socket.socket, app: ClientApp) -> None:
        refusal = self._refusal(caller)
        send_frame(caller, refusal.encode())
        if refusal:
            log(WARNING, "refused a message: the worker %s", refusal)
            return
        from client_app.institution import release_data
        from finetuning.devices import is_broken

        message = message_from_proto(MessageProto.FromString(receive_frame(caller)))
        context = context_from_proto(ContextProto.FromString(receive_frame(caller)))
        if context.run_id != self._run:  # data may be cached for a run with other settings
            release_data()
            self._run = context.run_id
        problem, reply = "", b""
        with self._ending_with(caller):
            try:
                reply = message_to_proto(app(message, context)).SerializeToString()
            except Exception as error:
                log(ERROR, "a message's handler raised an exception", exc_info=error)
                problem = type(error).__name__
        try:
            send_frame(caller, problem.encode())
            send_frame(caller, reply)
        finally:
            if is_broken():
                log(ERROR, "a GPU kernel has failed, so no other can run; the worker exits")
                sys.exit(TRY_AGAIN)

    def _refusal(self, caller: socket.socket) -> str:
        """Return the reason for refusing a caller; empty if the caller is accepted."""
        uid = peer_uid(caller)
        if uid not in self._uids:
            return f"doesn't answer user {uid}: start it with --allow-uid {uid}"
        code = receive_frame(caller, len(self._code)).decode(errors="replace")
        if not code == self._code == code_digest():
            return (
                f"runs code other than the run's app ({self._code:.16} and {code:.16}): restart it "
                "from the same release"
            )
        return ""

    @contextmanager
    def _ending_with(self, caller: socket.socket) -> Iterator[None]:
        """Within the context, exit the process if the caller ends, and refuse other callers."""
        done, finish = socket.socketpair()
        thread = Thread(target=self._watch, args=(caller, done), name="caller", daemon=True)
        thread.start()
        try:
            yield
        finally:
            finish.close()
            thread.join()
            done.close()

    def _watch(self, caller: socket.socket, done: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._listener, caller, done):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if done in ready:
                    return
                if caller in ready:
                    log(WARNING, "the caller ended before it had the reply, so the worker exits")
                    os._exit(TRY_AGAIN)
                with suppress(OSError):
                    other, _ = self._listener.accept()
                    with other:
                        send_frame(other, b"is busy with another message")


@contextmanager
def listening(path: Path, shared: bool) -> Iterator[socket.socket]:
    """Listen on a socket that only this user or, if ``shared``, also the socket's group can use.

    Raise ``WorkerError`` if the folder is writable by every user, another worker is listening, or
    the path is not a socket; or ``OSError`` if the socket can't be created.
    """
    refuse_open_folder(path)
    try:
        # Unlike a lock, a socket file remains after its process has ended.
        with (
            FileLock(f"{path}.lock", timeout=0, mode=0o600),
            socket.socket(socket.AF_UNIX) as listener,
        ):
            if path.exists() and not path.is_socket():
                raise WorkerError(
                    f"can't listen at {path}: it is a file, not a socket; name another path"
                )
            path.unlink(missing_ok=True)
            before = os.umask(0o117 if shared else 0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen()
            yield listener
    except Timeout as error:
        raise WorkerError("is already running: its socket is locked") from error


def main() -> None:
    """Run the worker until the process ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--allow-uid", type=int, action="append", default=[], help="id of another user to answer"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    path = ""
    try:
        path = str(own_settings({}, deployed=True).get("worker", ""))
        if not path:
            sys.exit(f"chambers site worker: {os.environ[VARIABLE]} names no worker")
        # Import this before callers can connect: it is slow, and they wait for 30 seconds.
        from client_app import handlers  # noqa: F401

        with listening(Path(path), shared=bool(arguments.allow_uid)) as listener:
            Worker(listener, {os.getuid(), *arguments.allow_uid}).serve()
    except PolicyError as error:
        sys.exit(f"chambers site worker: {error}")
    except (WorkerError, OSError) as error:
        sys.exit(f"chambers site worker: {path}: the worker {error}")


if __name__ == "__main__":
    main()
