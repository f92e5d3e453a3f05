"""Waiting for other threads and processes."""

import inspect
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 20.0,
    seen: Callable[[], object] | None = None,
) -> None:
    """Wait until a condition is true; fail if it isn't true within ``seconds``.

    Args:
        condition: Called frequently at first, and later twice a second.
        seconds: Timeout that only a fault can exceed.
        seen: Returns the value that the failure shows; by default, the condition is shown.

    """
    end, pause = time.monotonic() + seconds, 0.02
    while not condition():
        if time.monotonic() >= end:
            told = inspect.getsource(condition).strip() if seen is None else seen()
            raise AssertionError(f"not within {seconds:g} s: {told}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
