"""A lock for functions that create models."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Serialise, across threads, the calls of all functions with this decorator.

    While ``transformers`` creates a model, PyTorch's default data type, which all threads share, is
    changed and then restored. If two threads create models at once, bfloat16 can remain set.
    """
    with _lock:
        yield
