"""Progress bars that are readable in a log."""

import sys
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm


def _write_line(text: str) -> None:
    """Write an update of a progress bar as a separate line."""
    if line := text.strip("\r\n "):
        sys.stderr.write(line + "\n")


def progress_bar(total: int, description: str) -> Any:
    """Return a ``tqdm`` bar; in a log, it writes a line at most once every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, leave=False)
    return tqdm(
        total=total,
        desc=description,
        file=SimpleNamespace(write=_write_line, flush=sys.stderr.flush),
        ascii=" #",
        ncols=100,
        mininterval=10,
        maxinterval=60,
    )
