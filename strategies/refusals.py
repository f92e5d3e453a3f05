"""Which replies may enter an average: anything odd is refused, with a reason in words."""

import math

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from strategies.messages import ARRAYS, METRICS, SIZE, config_of, metrics_of, problem_of


def reason_to_refuse(
    reply: Message,
    expected_name: str,
    base: str,
    reference: ArrayRecord | None,
    minimum: float = -math.inf,
) -> str | None:
    """Say why a reply can't be used, or None if it can.

    Args:
        reply: of a train or evaluate message.
        expected_name: the client that was asked.
        base: digest of the run's base model.
        reference: names and shapes that the reply's arrays must have; None if it has none.
        minimum: of the arrays' values.

    """
    problem = problem_of(reply) or _odd_claims(reply, expected_name, base)
    if problem is not None or reference is None:
        return problem
    return _odd_arrays(reply.content.array_records.get(ARRAYS), reference, minimum)


def _odd_claims(reply: Message, expected_name: str, base: str) -> str | None:
    """Look at what a reply says of itself."""
    config, metrics = config_of(reply), metrics_of(reply)
    if config.get("name") != expected_name:
        return f"it now calls itself {config.get('name')!r}"
    if config.get("base") != base:
        return "it trained another base model (the fingerprints differ)"
    # What is averaged is every record of a reply, so there may be none but those looked at here.
    content = reply.content
    if set(content.metric_records) != {METRICS} or not set(content.array_records) <= {ARRAYS}:
        return "it sent more than was asked for"
    odd = [name for name, value in metrics.items() if not _is_finite_number(value)]
    if odd:
        return f"its {', '.join(odd)} are not finite numbers"
    size = metrics.get(SIZE)
    if not isinstance(size, int) or size <= 0:
        return f"its {SIZE} is {size!r}, and must be a positive whole number"
    return None


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _odd_arrays(arrays: ArrayRecord | None, reference: ArrayRecord, minimum: float) -> str | None:
    """Compare names, shapes and dtypes with the reference before any value is read."""
    if arrays is None:
        return "it sent no arrays"
    if set(arrays) != set(reference):
        odd = sorted(set(arrays) ^ set(reference))
        return f"its tensors are not the adapter's: {', '.join(odd[:3])}"
    for name, expected in reference.items():
        reason = _odd_array(arrays[name], expected, minimum)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _odd_array(array: Array, expected: Array, minimum: float) -> str | None:
    shape, dtype = tuple(expected.shape), expected.dtype
    if tuple(array.shape) != shape or array.dtype != dtype:
        return f"is {array.dtype}{list(array.shape)}, and must be {dtype}{list(shape)}"
    try:
        value = array.numpy()
    except Exception as error:  # whatever bytes from outside make numpy raise
        return f"can't be read: {error}"
    if value.shape != shape or str(value.dtype) != dtype:
        return "is not what its header says"
    if not np.isfinite(value).all():
        return "has values that are not finite numbers"
    return None if value.min(initial=math.inf) >= minimum else f"has values below {minimum:g}"
