"""A cache that keeps the loaded model in a process between messages."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

Kept = dict[object, object]
_of_process: Kept = {}
_kept: ContextVar[Kept] = ContextVar("kept", default=_of_process)


def keep_one(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache only the most recent result across all functions with this decorator.

    The old result is released before a new one is loaded, so that only one model is in memory.
    """

    @wraps(load)
    def get(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        kept = _kept.get()
        key = (load, args, tuple(sorted(kwargs.items())))
        if key not in kept:
            kept.clear()
            gc.collect()  # modules contain reference cycles
            kept[key] = load(*args, **kwargs)
        return kept[key]  # type: ignore[return-value]

    return get


@contextmanager
def keeping_in(kept: Kept) -> Iterator[None]:
    """Use ``kept`` as this thread's cache, for clients that train concurrently in one process."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
