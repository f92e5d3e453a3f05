"""Collect and check the replies of one phase; record which clients are left out, and why."""

import re
from collections.abc import Collection, Iterable, Mapping
from logging import WARNING

from flwr.app import ArrayRecord, Message
from flwr.common import log

from federation.messages import LARGEST_METRIC, metrics_of, problem_of
from strategies.journal import Journal
from strategies.live_status import LiveStatus
from strategies.participants import Participants, TooFewClientsError
from strategies.refusals import NOT_FINITE
from strategies.replies import Replies

# Losses of the models that are the same at all clients.
_LOSSES = ("base.loss", "global.loss")
# Matches error messages of the training loop and of lanes about values that aren't finite.
_NOT_FINITE = re.compile(r"\b(not finite|nan|inf|infinite)\b", re.IGNORECASE)


class NotFiniteError(RuntimeError):
    """Most clients report that the global adapter is unusable."""


def collect(
    collected: Replies,
    replies: Iterable[Message],
    participants: Participants,
    status: LiveStatus,
    reference: ArrayRecord | None,
    minimum: float,
) -> None:
    """Check replies as they arrive; release each reply's memory before the next one is pulled.

    ``collected`` receives the valid replies, and the reasons for leaving out other clients.
    ``reference`` contains the required names and shapes of arrays; None for replies without arrays.
    ``minimum`` is the smallest allowed value in the arrays.
    """
    for reply in replies:
        if sender := participants.sender_of(reply):
            reason = participants.check(reply, sender, reference, minimum)
            if reason is None:
                collected.add(sender.name, reply, has_arrays=reference is not None)
            else:
                collected.left_out[sender.name] = reason
                if _says_not_finite(reply, reason):
                    collected.not_finite.append(sender.name)
            status.add(sender.name, reason)
        del reply  # release its memory before the next reply is pulled
    collected.left_out |= participants.missing({*collected.metrics, *collected.left_out})
    collected.sort()
    for name, reason in collected.left_out.items():
        log(WARNING, "%s is left out: %s", name, reason)


def _says_not_finite(reply: Message, reason: str) -> bool:
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
        "clients that were scaled down or left out (metrics.jsonl), or start a new run with a "
        "lower train.learning-rate"
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
