"""The loaded model, kept between the messages that a process answers."""

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
    """Keep what a function has loaded until one with this decorator loads something else.

    The old is released before the new is loaded, so that memory holds one model.
    """

    @wraps(load)
    def get(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        kept = _kept.get()
        key = (load, args, tuple(sorted(kwargs.items())))
        if key not in kept:
            kept.clear()
            gc.collect()  # modules refer to each other
            kept[key] = load(*args, **kwargs)
        return kept[key]  # type: ignore[return-value]

    return get


@contextmanager
def keeping_in(kept: Kept) -> Iterator[None]:
    """Keep this thread's model in ``kept``, for clients that train at once in one process."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
