"""Check whether the replies of one phase suffice, and whether the global adapter is usable."""

import re
from collections.abc import Collection, Mapping

from flwr.app import Message

from federation.messages import LARGEST_METRIC, metrics_of, problem_of
from strategies.journal import Journal
from strategies.participants import TooFewClientsError
from strategies.refusals import NOT_FINITE
from strategies.replies import Replies

# Metrics with the losses of the two models that all clients share.
_LOSSES = ("base.loss", "global.loss")
# Matches error messages about non-finite values, from the training loop or from a lane.
_NOT_FINITE = re.compile(r"\b(not finite|nan|inf|infinite)\b", re.IGNORECASE)


class NotFiniteError(RuntimeError):
    """Most clients report that the global adapter is unusable."""


def says_not_finite(reply: Message, reason: str) -> bool:
    """Return whether a refused reply reports or contains values that aren't finite."""
    if problem_of(reply) is not None:
        return _NOT_FINITE.search(reason) is not None
    metrics = metrics_of(reply)
    losses = [metrics[name] for name in _LOSSES if isinstance(metrics.get(name), float)]
    return any(not abs(loss) <= LARGEST_METRIC for loss in losses) or reason.endswith(NOT_FINITE)


def require_finite(
    journal: Journal, adapter_round: int, collected: Replies, asked: Collection[str]
) -> None:
    """Raise ``NotFiniteError`` if most clients report a global adapter as unusable.

    The adapter's checkpoint is then deleted if an earlier checkpoint exists. A majority of the
    clients ``asked`` is required, so that a minority can't reject an adapter. Valid replies of a
    client that withholds metrics never report an unusable adapter.
    """
    if 2 * len(collected.not_finite) <= len(asked):
        return
    journal.discard(adapter_round)
    raise NotFiniteError(
        f"the global adapter after round {adapter_round} is unusable: losses or gradients are not "
        f"finite numbers at {', '.join(sorted(collected.not_finite))}. Resume the run without the "
        "clients that were scaled down or left out (see metrics.jsonl), or start a new run with "
        "a lower train.learning-rate"
    )


def require_enough(phase: str, collected: Replies, minimum: int) -> None:
    """Raise ``TooFewClientsError`` if there are fewer than ``minimum`` valid replies."""
    valid = len(collected.metrics)
    if valid < minimum:
        lines = "".join(f"\n  {name}: {reason}" for name, reason in collected.left_out.items())
        raise TooFewClientsError(
            f"{phase}: {valid} valid replies, but min-nodes = {minimum} are required; left out:"
            f"{lines or ' nobody'}"
        )


def reasons(left_out: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the clients left out and the reasons, in the format of ``metrics.jsonl``."""
    return [{"client": name, "reason": reason} for name, reason in left_out.items()]
