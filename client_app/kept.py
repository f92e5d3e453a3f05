"""The loaded model, kept between the messages that a process answers."""

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_kept: dict[object, object] = {}


def keep_one(load: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep what a function has loaded until one with this decorator loads something else.

    The old is released before the new is loaded, so that memory holds one model.
    """

    @wraps(load)
    def get(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        key = (load, args, tuple(sorted(kwargs.items())))
        if key not in _kept:
            _kept.clear()
            gc.collect()  # modules refer to each other
            _kept[key] = load(*args, **kwargs)
        return _kept[key]  # type: ignore[return-value]

    return get
