"""Collect and check the replies of one phase; record which clients are left out, and why."""

from collections.abc import Iterable, Mapping
from logging import WARNING

from flwr.app import ArrayRecord, Message
from flwr.common import log

from strategies.live_status import LiveStatus
from strategies.not_finite import says_not_finite
from strategies.participants import Participants, TooFewClientsError
from strategies.replies import Replies


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
                if says_not_finite(reply, reason):
                    collected.not_finite.append(sender.name)
            status.add(sender.name, reason)
        del reply  # release its memory before the next reply is pulled
    collected.left_out |= participants.missing({*collected.metrics, *collected.left_out})
    collected.sort()
    for name, reason in collected.left_out.items():
        log(WARNING, "%s is left out: %s", name, reason)


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
