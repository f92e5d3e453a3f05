"""A lock for functions that create models."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.RLock()


def one_at_a_time(make: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Serialise, across threads, the calls of all functions with this decorator.

    While ``transformers`` creates a model, PyTorch's default data type, which all threads share, is
    changed and then restored. If two threads create models at once, bfloat16 can remain set.
    """

    @wraps(make)
    def alone(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _lock:
            return make(*args, **kwargs)

    return alone
