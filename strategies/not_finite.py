"""Whether clients find the global adapter unusable: its loss or gradient is no finite number."""

import re

from flwr.app import Message

from federation.messages import LARGEST_METRIC, metrics_of, problem_of
from strategies.journal import Journal
from strategies.refusals import NOT_FINITE
from strategies.replies import Replies

# Losses of the models that all clients have in common.
_LOSSES = ("base.loss", "global.loss")
# In errors of the training loop and of a lane.
_NOT_FINITE = re.compile(r"\b(not finite|nan|inf|infinite)\b", re.IGNORECASE)


class NotFiniteError(RuntimeError):
    """Most clients find the global adapter unusable."""


def says_not_finite(reply: Message, reason: str) -> bool:
    """Return whether a reply that is refused for a reason says so."""
    if problem_of(reply) is not None:
        return _NOT_FINITE.search(reason) is not None
    metrics = metrics_of(reply)
    losses = [metrics[name] for name in _LOSSES if isinstance(metrics.get(name), float)]
    return any(not abs(loss) <= LARGEST_METRIC for loss in losses) or reason.endswith(NOT_FINITE)


def require_finite(journal: Journal, adapter_round: int, collected: Replies, asked: int) -> None:
    """Drop the checkpoint of a global adapter that most of the clients find unusable.

    These are most of those that were asked, so one alone can't veto an adapter. Where metrics are
    withheld, a valid reply doesn't say that an adapter is unusable.

    Raises:
        NotFiniteError: They do.

    """
    if 2 * len(collected.not_finite) <= asked:
        return
    journal.discard(adapter_round)
    raise NotFiniteError(
        f"the global adapter after round {adapter_round} is unusable, and isn't kept: losses or "
        f"gradients are not finite numbers at {', '.join(sorted(collected.not_finite))}. Resume "
        "without a client that was scaled down or left out (metrics.jsonl), or start again with a "
        "lower train.learning-rate"
    )
