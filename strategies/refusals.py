"""Checks of clients' replies: malformed or excessive ones are refused, with a reason.

Reasons quote replies: apply ``printable`` before they are logged or stored.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from federation.answers import answers_problem
from federation.messages import (
    ARRAYS,
    LARGEST_METRIC,
    METRICS,
    SIZE,
    TRAIN_EXAMPLES,
    config_of,
    is_name,
    metrics_of,
    problem_of,
)
from finetuning.model.fingerprint import differences
from split.protocol.errors import printable

# Description of an array.
NOT_FINITE = "has values that are not finite numbers"
_MAX_EXAMPLES = 10**9
# Instead of a digest, if there is no majority for one.
_DISPUTED = "disputed"
_MAX_METRICS = 100
_METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
# Adapters' weights and importances are far smaller; an average with larger ones could overflow.
_LARGEST_WEIGHT = 2.0**30


def reason_to_refuse(
    reply: Message,
    *,
    name: str,
    examples: int,
    base: str,
    reference: ArrayRecord | None,
    minimum: float = -math.inf,
    answers: int = 0,
) -> str | None:
    """Return why a reply can't be used, or None if it can.

    Args:
        reply: Reply to a train or evaluate message.
        name: Name of the client.
        examples: Its number of training examples when it registered.
        base: Digest of the run's base model.
        reference: Names and shapes that the reply's arrays must have; None if it has none.
        minimum: Smallest value that the arrays may have.
        answers: Maximum number of answers that it may have as text, of each model.

    """
    return (
        problem_of(reply)
        or _identity_problem(reply, name, base)
        or _metrics_problem(metrics_of(reply), examples)
        or answers_problem(reply, answers)
        or _arrays_problem(reply.content.array_records.get(ARRAYS), reference, minimum)
    )


def reason_to_refuse_registration(
    reply: Message, name: str, taken: set[str], assigned: str, fingerprint: Mapping[str, str]
) -> str | None:
    """Return why a client can't take part, or None if it can.

    Args:
        reply: Reply to a query message.
        name: Name in the reply.
        taken: Names of other clients.
        assigned: Name under which the coordinator has registered the SuperNode's key; empty if it
            has none.
        fingerprint: Fingerprint of what the client must hold of the base model; an empty digest is
            unknown.

    """
    if problem := problem_of(reply):
        return problem
    if not is_name(name):
        return (
            f"the name {printable(name, 64)!r} must be letters, digits, spaces, '.', '_' or '-' "
            "(at most 64)"
        )
    if assigned and name != assigned:
        return (
            f"its SuperNode is registered as {assigned!r} (flwr supernode register --name), and "
            f"its name is {name!r}; give both the same"
        )
    # Names become folders, and some file systems don't distinguish upper and lower case.
    if name.casefold() in {other.casefold() for other in taken}:
        return (
            f"another SuperNode is named {name!r} already (upper and lower case count as equal); "
            "give each its own name"
        )
    config, metrics = config_of(reply), metrics_of(reply)
    for key in (SIZE, *({TRAIN_EXAMPLES} & metrics.keys())):
        count = metrics.get(key)
        if not isinstance(count, int) or not 0 < count <= _MAX_EXAMPLES:
            return f"its {key} is {count!r}, and must be a whole number from 1 to {_MAX_EXAMPLES}"
    return _base_model_problem(config.get("tensors"), config.get("digests"), fingerprint)


def agreed(configs: Iterable[Mapping[str, Any]], fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return digests of the tensors that the coordinator doesn't hold, as most clients report them.

    A tensor on which there is no majority has a digest that no client has: who is wrong must be
    found out before training.

    Args:
        configs: Config records of the replies to query messages.
        fingerprint: Fingerprint of what clients must hold; an empty digest is unknown.

    """
    reported = [
        dict(zip(config["tensors"], config["digests"], strict=True))
        for config in configs
        if _are_lists_of_texts(config.get("tensors"), config.get("digests"))
    ]
    found = {}
    for name in (name for name, known in fingerprint.items() if not known):
        counts = Counter(each[name] for each in reported if name in each)
        if counts:
            ((digest, count),) = counts.most_common(1)
            found[name] = digest if 2 * count > counts.total() else _DISPUTED
    return found


def _base_model_problem(tensors: Any, digests: Any, fingerprint: Mapping[str, str]) -> str | None:
    if not _are_lists_of_texts(tensors, digests):
        return "it doesn't report its base model"
    theirs = dict(zip(tensors, digests, strict=True))
    other = differences({k: v or theirs.get(k, v) for k, v in fingerprint.items()}, theirs)
    if not other:
        return None
    more = f" and {len(other) - 3} more" if len(other) > 3 else ""
    if _DISPUTED in (fingerprint[name] for name in other if name in fingerprint):
        return (
            f"the clients' base models differ from each other in {', '.join(other[:3])}{more}, and "
            "the coordinator doesn't hold these tensors; compare the checkpoints"
        )
    return (
        f"its base model is not the run's: {', '.join(other[:3])}{more} differ; give it the same "
        "checkpoint"
    )


def _are_lists_of_texts(one: Any, other: Any) -> bool:
    return _are_texts(one) and _are_texts(other) and len(one) == len(other)


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _identity_problem(reply: Message, name: str, base: str) -> str | None:
    config = config_of(reply)
    if config.get("name") != name:
        return f"its name is now {config.get('name')!r}"
    if config.get("base") != base:
        return "it trained another base model (the fingerprints differ)"
    # Flower averages every record of a reply, so there must be none besides those checked here.
    content = reply.content
    if set(content.metric_records) != {METRICS} or not set(content.array_records) <= {ARRAYS}:
        return "it sent more than was requested"
    return None


def _metrics_problem(metrics: Mapping[str, Any], examples: int) -> str | None:
    """Check number, names, types and sizes of metrics, which are stored and averaged."""
    if len(metrics) > _MAX_METRICS:
        return f"it sent {len(metrics)} metrics; at most {_MAX_METRICS} are accepted"
    invalid = [name for name in metrics if not _METRIC_NAME.fullmatch(name)]
    if invalid:
        return f"its metric {printable(invalid[0], 64)!r} must have a name of at most 64 letters"
    invalid = [name for name, value in metrics.items() if not _is_bounded_number(value)]
    if invalid:
        return f"its {', '.join(invalid[:3])} are not finite numbers up to {LARGEST_METRIC:g}"
    if metrics.get(SIZE) != examples:
        return (
            f"its {SIZE} is {metrics.get(SIZE)!r} and was {examples} when it joined; restart its "
            "SuperNode after its data has changed"
        )
    return None


def _is_bounded_number(value: object) -> bool:
    return isinstance(value, int | float) and -LARGEST_METRIC <= value <= LARGEST_METRIC


def _arrays_problem(
    arrays: ArrayRecord | None, reference: ArrayRecord | None, minimum: float
) -> str | None:
    """Compare names, shapes and dtypes with the reference before any value is read."""
    if reference is None:
        return None
    if arrays is None:
        return "it sent no arrays"
    if set(arrays) != set(reference):
        different = sorted(set(arrays) ^ set(reference))
        return f"its tensors are not the adapter's: {', '.join(different[:3])}"
    for name, expected in reference.items():
        reason = _array_problem(arrays[name], expected, minimum)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _array_problem(array: Array, expected: Array, minimum: float) -> str | None:
    shape, dtype = tuple(expected.shape), expected.dtype
    if tuple(array.shape) != shape or array.dtype != dtype:
        return f"is {array.dtype}{list(array.shape)}, and must be {dtype}{list(shape)}"
    try:
        value = array.numpy()
    except Exception as error:  # untrusted bytes can make NumPy raise anything
        return f"can't be read: {error}"
    # NumPy also reads archives of arrays.
    if not isinstance(value, np.ndarray) or value.shape != shape or str(value.dtype) != dtype:
        return "does not match its header"
    if not np.isfinite(value).all():
        return NOT_FINITE
    if np.abs(value).max(initial=0.0) > _LARGEST_WEIGHT:
        return "has values beyond 2³⁰"
    return None if value.min(initial=math.inf) >= minimum else f"has values below {minimum:g}"
