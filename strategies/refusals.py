"""Check the replies of clients; malformed or excessive replies are refused with a reason.

Reasons may quote replies: apply ``printable`` before logging or storing them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message

from federation.messages import (
    ARRAYS,
    LARGEST_METRIC,
    METRICS,
    RANK,
    SIZE,
    TRAIN_EXAMPLES,
    answers_problem,
    config_of,
    metrics_of,
    problem_of,
)
from federation.names import RULE, folded, is_name
from finetuning.errors import printable
from finetuning.model.fingerprint import differences

# Metrics with the losses of the two models that all clients share.
_LOSSES = ("base.loss", "global.loss")
# Matches error messages about non-finite values, from the training loop or from a lane.
_REPORTED_NOT_FINITE = re.compile(r"\b(not finite|nan|inf|infinite)\b", re.IGNORECASE)
# Ending of the reason for refusing an array that contains NaN or infinity.
_NOT_FINITE = "has values that are not finite numbers"
_MAX_EXAMPLES = 10**9
# Used instead of a digest if no digest has a majority.
_DISPUTED = "disputed"
_MAX_METRICS = 100
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# Weights and importances are far smaller; larger values could overflow in an average.
_LARGEST_WEIGHT = 2.0**30


def reason_to_refuse(
    reply: Message,
    name: str,
    examples: int,
    base: str,
    reference: ArrayRecord | None,
    minimum: float = -math.inf,
    answers: int = 0,
) -> str | None:
    """Return why a client's reply to a train or evaluate message can't be used, or None if it can.

    The client registered as ``name``, with ``examples`` training rows; ``base`` is the digest of
    the run's base model. ``reference`` contains the required names and shapes of the arrays, or is
    None for a reply without arrays; ``minimum`` is the smallest value allowed in the arrays. The
    reply may contain at most ``answers`` generated answers for each model.
    """
    return (
        problem_of(reply)
        or _identity_problem(reply, name, base)
        or _metrics_problem(metrics_of(reply), examples)
        or answers_problem(reply, answers)
        or _arrays_problem(reply.content.array_records.get(ARRAYS), reference, minimum)
    )


def says_not_finite(reply: Message, reason: str) -> bool:
    """Return whether a refused reply reports or contains values that aren't finite."""
    if problem_of(reply) is not None:
        return _REPORTED_NOT_FINITE.search(reason) is not None
    metrics = metrics_of(reply)
    losses = [metrics[name] for name in _LOSSES if isinstance(metrics.get(name), float)]
    return any(not abs(loss) <= LARGEST_METRIC for loss in losses) or reason.endswith(_NOT_FINITE)


def reason_to_refuse_registration(
    reply: Message,
    name: str,
    name_only: bool,
    taken: set[str],
    assigned: str,
    fingerprint: Mapping[str, str],
    max_rank: int = 0,
) -> str | None:
    """Return why a client can't take part, given its reply to a query message, or None if it can.

    ``name`` is the name in the reply, ``taken`` the other clients' names, and ``assigned`` the name
    that the coordinator registered for the SuperNode's key, if any. With ``name_only``, the reply
    may lack the data size. ``fingerprint`` has the digests of the tensors that clients must have;
    empty digests are unknown. ``max_rank`` is ``adapter.rank`` if ranks differ, else 0.
    """
    if problem := problem_of(reply):
        return problem
    if not is_name(name):
        return f"the name {printable(name, 64)!r} {RULE}"
    if assigned and name != assigned:
        return (
            f"its SuperNode is registered as {assigned!r} (flwr supernode register --name), but "
            f"its site file has name {name!r}; make them equal"
        )
    # Names are used as folder names, and some file systems are case-insensitive.
    if folded(name) in map(folded, taken):
        return (
            f"another SuperNode is already named {name!r} (names are case-insensitive); give each "
            "SuperNode a different name"
        )
    return _counts_problem(metrics_of(reply), name_only, max_rank) or _base_model_problem(
        _reported(config_of(reply)), fingerprint
    )


def _counts_problem(metrics: Mapping[str, Any], name_only: bool, max_rank: int) -> str | None:
    for key in (SIZE, TRAIN_EXAMPLES):
        if key not in metrics and (name_only or key != SIZE):
            continue
        count = metrics.get(key)
        if not isinstance(count, int) or not 0 < count <= _MAX_EXAMPLES:
            return f"its {key} is {count!r}, but must be a whole number from 1 to {_MAX_EXAMPLES}"
    rank = metrics.get(RANK)
    if max_rank and SIZE in metrics and not (isinstance(rank, int) and 0 < rank <= max_rank):
        return f"the rank of its adapter is {rank!r}, but must be a whole number up to {max_rank}"
    return None


def agreed(configs: Iterable[Mapping[str, Any]], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return the majority digests of the tensors whose digest in ``fingerprint`` is empty.

    The coordinator doesn't have these tensors. ``configs`` are the config records of the replies to
    query messages. If no digest has a majority, return one that no client can match, so that the
    difference must be resolved before training.
    """
    reported = [theirs for config in configs if (theirs := _reported(config)) is not None]
    found = {}
    for name in (name for name, known in fingerprint.items() if not known):
        counts = Counter(each[name] for each in reported if name in each)
        if counts:
            ((digest, count),) = counts.most_common(1)
            found[name] = digest if 2 * count > counts.total() else _DISPUTED
    return found


def _base_model_problem(
    theirs: Mapping[str, str] | None, fingerprint: Mapping[str, str]
) -> str | None:
    if theirs is None:
        return "it doesn't report its base model"
    other = differences({k: v or theirs.get(k, v) for k, v in fingerprint.items()}, theirs)
    if not other:
        return None
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    if _DISPUTED in (fingerprint[name] for name in other if name in fingerprint):
        return (
            f"the clients' base models differ from each other in {', '.join(other[:3])}{more}, "
            "which the coordinator can't check; compare the clients' checkpoints"
        )
    return (
        f"its base model is not the run's: {', '.join(other[:3])}{more} differ; use the run's "
        "checkpoint at every client"
    )


def _reported(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the digests of tensors in a reply to a query, or None if they are malformed."""
    lists: list[Any] = [config.get("tensors"), config.get("digests")]
    if not all(isinstance(v, list) and all(isinstance(t, str) for t in v) for v in lists):
        return None
    return dict(zip(*lists, strict=True)) if len(lists[0]) == len(lists[1]) else None


def _identity_problem(reply: Message, name: str, base: str) -> str | None:
    config = config_of(reply)
    if config.get("name") != name:
        return f"its name is now {config.get('name')!r}, but was {name!r} when it joined"
    if config.get("base") != base:
        return "it used a different base model (the fingerprints differ)"
    # Records with other names would not be checked, so they are refused.
    content = reply.content
    if set(content.metric_records) != {METRICS} or not set(content.array_records) <= {ARRAYS}:
        return "it sent more than was requested"
    return None


def _metrics_problem(metrics: Mapping[str, Any], examples: int) -> str | None:
    """Check the number, names, types and magnitudes of metrics, which are stored and averaged."""
    if len(metrics) > _MAX_METRICS:
        return f"it sent {len(metrics)} metrics; at most {_MAX_METRICS} are accepted"
    invalid = [name for name in metrics if not _METRIC_NAME.fullmatch(name)]
    if invalid:
        return (
            f"the name of its metric {printable(invalid[0], 64)!r} must be at most 64 letters, "
            "digits, '_', '.' or '-', and begin with a letter"
        )
    invalid = [
        name
        for name, value in metrics.items()
        if not (isinstance(value, int | float) and abs(value) <= LARGEST_METRIC)
    ]
    if invalid:
        names = ", ".join(invalid[:3])
        return f"its metrics must be numbers up to ±{LARGEST_METRIC:g}; these are not: {names}"
    if metrics.get(SIZE) != examples:
        return (
            f"its {SIZE} is {metrics.get(SIZE)!r}, but was {examples} when it joined; if its data "
            "has changed, restart its SuperNode"
        )
    return None


def _arrays_problem(
    arrays: ArrayRecord | None, reference: ArrayRecord | None, minimum: float
) -> str | None:
    """Compare names with the reference, and each shape and dtype before reading the values."""
    if reference is None:
        return None
    if arrays is None:
        return "it sent no arrays"
    if set(arrays) != set(reference):
        different = sorted(set(arrays) ^ set(reference))
        return f"its tensors are not the adapter's: {', '.join(different[:3])}"
    for name, expected in reference.items():
        if reason := _array_problem(arrays[name], expected, minimum):
            return f"{name} {reason}"
    return None


def _array_problem(array: Array, expected: Array, minimum: float) -> str | None:
    shape, dtype = tuple(expected.shape), expected.dtype
    if tuple(array.shape) != shape or array.dtype != dtype:
        return f"is {array.dtype}{list(array.shape)}, but must be {dtype}{list(shape)}"
    try:
        value = array.numpy()
    except Exception as error:  # untrusted bytes can make NumPy raise anything
        return f"can't be read: {error}"
    # NumPy can also load archives, which aren't arrays.
    if not isinstance(value, np.ndarray) or value.shape != shape or str(value.dtype) != dtype:
        return "does not match its header"
    is_masked = value.dtype.kind == "u"  # any value is possible
    return None if is_masked else _value_problem(value, minimum)


def _value_problem(value: npt.NDArray[np.floating], minimum: float) -> str | None:
    if not np.isfinite(value).all():
        return _NOT_FINITE
    if np.abs(value).max(initial=0.0) > _LARGEST_WEIGHT:
        return "has values beyond 2³⁰"
    return None if value.min(initial=math.inf) >= minimum else f"has values below {minimum:g}"
