"""Progress bars that are readable in a log."""

import sys
from types import SimpleNamespace
from typing import Any

from tqdm import tqdm


def progress_bar(total: int, description: str) -> Any:
    """Return a ``tqdm`` bar; in a log, it writes a line at most once every ten seconds."""
    stream = sys.stderr
    if stream.isatty():
        return tqdm(total=total, desc=description, leave=False)

    def write(text: str) -> None:
        if line := text.strip("\r\n "):
            stream.write(line + "\n")

    return tqdm(
        total=total,
        desc=description,
        file=SimpleNamespace(write=write, flush=stream.flush),
        ascii=" #",
        ncols=100,
        mininterval=10,
        maxinterval=60,
    )
