"""``chambers site worker``: run a process that answers messages and keeps the model in memory."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from chambers.sources import argument, option


@dataclass(frozen=True)
class Worker:
    """Answer this institution's messages in one process that keeps model and data in memory.

    \b
      chambers site worker /run/chambers/worker.sock

    Without a worker, each message starts a process that loads model and data again. Set the socket
    in the SuperNode's configuration: --node-config 'worker="/run/chambers/worker.sock" …'. Don't
    share the folder with other sites. docs/worker.md describes when a running worker isn't used.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    socket: Annotated[Path, argument("SOCKET")]
    allow_uid: Annotated[
        list[int] | None,
        option("Another user whose ClientApps may use the worker; may be repeated.", "UID"),
    ] = None

    def __call__(self) -> NoReturn:
        """Replace this process with the worker."""
        allowed = [f"--allow-uid={uid}" for uid in self.allow_uid or []]
        # -P prevents imports from the working directory, which other users may control.
        command = [sys.executable, "-P", "-m", "client_app.worker", str(self.socket), *allowed]
        code = Path(__file__).resolve().parents[2]
        sys.stdout.flush()
        os.execve(command[0], command, {**os.environ, "PYTHONPATH": str(code)})
