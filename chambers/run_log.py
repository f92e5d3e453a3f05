"""The log of a simulated run: the output of Flower, Ray, the ServerApp and the clients."""

import re
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

_COLOUR = re.compile(rb"\x1b\[\d+m")


class RunLog:
    """A log file that is moved to the run's folder once that folder exists.

    Output is dropped if the disk is full, so that the run continues. With ``echo``, output is also
    printed. ``path`` is the current file.
    """

    def __init__(self, path: Path, echo: bool = False) -> None:
        self.path = path
        self._echo = echo
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, text: bytes) -> None:
        """Append text to the log."""
        with self._lock, suppress(OSError):
            self._file.write(_COLOUR.sub(b"", text))
        if self._echo:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()

    def move_to(self, path: Path) -> None:
        """Move the log to a file, such as the log of a resumed run, and append new output there."""
        with self._lock, suppress(OSError):
            if path == self.path:
                return
            target = path.open("ab", buffering=0)
            with self.path.open("rb") as before:
                shutil.copyfileobj(before, target)
            self._file.close()
            self.path.unlink()
            self.path, self._file = path, target
