"""What server and clients say to each other in Flower messages, written down once.

Every message has a ConfigRecord ``config``; adapters travel as float32 ArrayRecords. A client that
can't do what it is asked answers with a ``problem`` in words, which reaches people unchanged.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from split.protocol.invitation import Invitation
from split.protocol.tickets import Identity, Ticket

ARRAYS = "arrays"
IMPORTANCE = "importance"
# The body's adapters, which clients take home from split learning.
BODY = {"global": "body", "personalised": "personalised-body"}
CONFIG = "config"
LANE = "lane"
METRICS = "metrics"
SIZE = "num-examples"

# A client's name; it becomes a folder's.
NAME = re.compile(r"\w[\w .-]{0,62}\w|\w")
_LINEAGE = re.compile(r"[\w-]{1,64}")

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Instruction:
    """What the server asks a client to do.

    Attributes:
        round: counted from 1; 0 is the evaluation before the first round.
        lineage: names the run across its resumptions; clients keep their state under it.
        base: digest of the base model's fingerprint.
        time_limit: seconds that the client has.
        losses: evaluate: measure held-out loss (and generate, where the run config says so).
        importance: evaluate: compute J at these weights. Train: use one's own J.
        final: evaluate: these are the run's last weights, to be kept.

    """

    round: int
    lineage: str
    base: str
    time_limit: float
    losses: bool = False
    importance: bool = False
    final: bool = False

    def to_record(self) -> ConfigRecord:
        """Write it as a ConfigRecord."""
        return ConfigRecord(asdict(self))

    @classmethod
    def of(cls, message: Message) -> "Instruction":
        """Read it from a message.

        Raises:
            ValueError: the lineage, which becomes a folder's name, can't be one.

        """
        record: Any = message.content.config_records[CONFIG]
        instruction = cls(**{name: record[name] for name in cls.__dataclass_fields__})
        if not _LINEAGE.fullmatch(instruction.lineage):
            raise ValueError(f"{instruction.lineage!r} can't be a run's lineage")
        return instruction


def lane_record(invitation: Invitation, models: Mapping[str, int] | None = None) -> ConfigRecord:
    """Write an invitation to a lane as a ConfigRecord; it holds the secret of a ticket.

    Args:
        invitation: to train, or to evaluate models.
        models: those to evaluate, each with the round that the server's part of it is of.

    """
    models = models or {}
    return ConfigRecord(
        {
            "models": list(models),
            "rounds": list(models.values()),
            "address": invitation.address,
            "suite": invitation.suite,
            "server-key": invitation.server_key,
            "run": invitation.identity.run,
            "round": invitation.identity.round,
            "node": invitation.identity.node,
            "ticket": invitation.ticket.identifier,
            "secret": invitation.ticket.secret,
        }
    )


def invitation_of(message: Message) -> Invitation:
    """Read the invitation to a lane from a message."""
    record: Any = message.content.config_records[LANE]
    return Invitation(
        record["address"],
        record["suite"],
        record["server-key"],
        Identity(record["run"], record["round"], record["node"]),
        Ticket(record["ticket"], record["secret"]),
    )


def models_of(message: Message) -> dict[str, int]:
    """Read which models a client is invited to evaluate, and of which round they are."""
    record: Any = message.content.config_records[LANE]
    return dict(zip(record["models"], record["rounds"], strict=True))


def to_arrays(state: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Copy tensors into an ArrayRecord as float32; the record shares no storage with them."""
    return ArrayRecord(
        {name: Array(value.detach().float().cpu().numpy()) for name, value in state.items()}
    )


def from_arrays(record: ArrayRecord) -> State:
    """Copy an ArrayRecord into tensors that share no storage with it."""
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def answer(
    message: Message,
    config: Mapping[str, Any],
    metrics: Mapping[str, int | float] | None = None,
    arrays: ArrayRecord | None = None,
) -> Message:
    """Make a reply.

    Args:
        message: what is answered.
        config: at least the client's ``name``.
        metrics: numbers; those of train and evaluate messages include ``num-examples``.
        arrays: the adapter, or J.

    """
    content = RecordDict({CONFIG: ConfigRecord(dict(config))})
    if metrics is not None:
        content[METRICS] = MetricRecord(dict(metrics))
    if arrays is not None:
        content[ARRAYS] = arrays
    return Message(content, reply_to=message)


def problem_of(message: Message) -> str | None:
    """Give what a reply says went wrong, on one line where Flower says it; None if nothing did."""
    if message.has_error():
        # Flower writes <class 'X'>:<'…'>, in simulation around its own exception's wording.
        reason = str(message.error.reason).rpartition("Message: ")[2].strip()
        return " ".join(reason.removesuffix("'>").split()) or f"error {message.error.code}"
    problem = config_of(message).get("problem")
    return str(problem) if problem else None


def config_of(message: Message) -> Mapping[str, Any]:
    """Give a reply's config; empty if it has none."""
    return {} if message.has_error() else message.content.config_records.get(CONFIG) or {}


def metrics_of(message: Message) -> Mapping[str, Any]:
    """Give a reply's metrics; empty if it has none."""
    return {} if message.has_error() else message.content.metric_records.get(METRICS) or {}
