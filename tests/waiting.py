"""Waiting for what other threads and processes do."""

import inspect
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    seconds: float = 20.0,
    seen: Callable[[], object] | None = None,
) -> None:
    """Wait until a condition is true; fail if it is not within so many seconds.

    Args:
        condition: Is asked often at first, and then twice a second.
        seconds: So many that they pass only if something is wrong.
        seen: Returns what the failure tells; without it, it tells the condition.

    """
    end, pause = time.monotonic() + seconds, 0.02
    while not condition():
        if time.monotonic() >= end:
            told = inspect.getsource(condition).strip() if seen is None else seen()
            raise AssertionError(f"not within {seconds:g} s: {told}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
