"""Progress bars that are readable in a log."""

import sys
from typing import Any, TextIO

from tqdm import tqdm


class _Lines:
    """A text stream that writes each update of a progress bar as a separate line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            self.stream.write(line + "\n")

    def flush(self) -> None:
        self.stream.flush()


def progress_bar(total: int, description: str) -> Any:
    """Return a ``tqdm`` bar; in a log, it writes a line at most once every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, leave=False)
    return tqdm(
        total=total,
        desc=description,
        file=_Lines(sys.stderr),
        ascii=" #",
        ncols=100,
        mininterval=10,
        maxinterval=60,
    )
