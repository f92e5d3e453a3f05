"""The Flower messages between server and clients: their records, and the records' keys.

Every message contains a ConfigRecord ``config``; adapters are sent as float32 ArrayRecords. A
client that can't carry out an instruction replies with a ``problem``: the text of the error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from pydantic import (
    Field,
    FiniteFloat,
    StrictBool,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from finetuning.adapters.adapter import State
from finetuning.errors import UserError, printable
from split.protocol.tickets import Identity, Invitation, Ticket

ARRAYS = "arrays"
IMPORTANCE = "importance"
# Names of the records with the body's adapters, which clients receive after the last round.
BODY = {"global": "body", "personalised": "personalised-body"}
CONFIG = "config"
LANE = "lane"
METRICS = "metrics"
SIZE = "num-rows"
RANK = "rank"  # of a client's adapter, if ranks differ
# In replies whose arrays are masked: the digest of all that determines them, in hexadecimal.
SUM = "sum"
# Number of training examples; exceeds the number of rows if a chat template splits conversations.
TRAIN_EXAMPLES = "train-examples"
# Record in replies of a client with an audit log: the number and digest of the reply's own line.
AUDIT = "audit"
# Answers to held-out questions, sent as text only if the run config and the policy allow it.
ANSWERS = "answers"
MODELS = ("base", "alone", "global", "personalised")

# Larger metrics could overflow in plots; TensorBoard stores them as float32.
LARGEST_METRIC = 1e30


class InstructionError(UserError, ValueError):
    """A message has no instruction, or a malformed one."""


@dataclass(frozen=True)
class Instruction:
    """The server's request to a client."""

    round: Annotated[StrictInt, Field(ge=0)]  # from 1; 0 is the evaluation before the first round
    # Identifies a run and its resumptions; also the name of the folder with a client's state.
    lineage: Annotated[StrictStr, Field(pattern=r"^[\w-]{1,64}$")]
    base: StrictStr  # digest of the base model's fingerprint
    # Seconds within which the client must carry out the request.
    time_limit: Annotated[FiniteFloat, Field(gt=0)]
    # Names of the modules that LoRA adapts, which the coordinator found from ``adapter.targets``.
    targets: StrictStr = ""
    # In query messages: a simulated client need not prepare its rows and report their number.
    name_only: StrictBool = False
    # In evaluate messages: measure losses (and generate answers if the run config requests them).
    losses: StrictBool = False
    # In evaluate messages: compute J at the global adapter. In train messages: use the client's J.
    importance: StrictBool = False
    # In evaluate messages: the message contains the run's final weights; save them.
    final: StrictBool = False

    @property
    def evaluates(self) -> bool:
        """Whether an evaluate message is needed."""
        return self.losses or self.importance or self.final

    def to_record(self) -> ConfigRecord:
        """Return the instruction as a ConfigRecord."""
        return ConfigRecord(asdict(self))

    @classmethod
    def of(cls, message: Message) -> "Instruction":
        """Read the instruction from a message.

        Raise ``InstructionError`` if the instruction is missing, or one of its values is invalid.
        """
        record = message.content.config_records.get(CONFIG, ConfigRecord())
        try:
            return _INSTRUCTION.validate_python(dict(record))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise InstructionError(f"the message's {key} is invalid: {problem['msg']}") from error


_INSTRUCTION = TypeAdapter(Instruction)


def one_line(text: str) -> str:
    """Return a text, possibly from an untrusted peer, as one printable line of bounded length."""
    return printable(" ".join(text[:10_000].split()))


def lane_record(invitation: Invitation, models: Mapping[str, int]) -> ConfigRecord:
    """Return an invitation to a lane as a ConfigRecord, which contains the ticket's secret.

    ``models`` maps the name of each model that the client evaluates (or, in train messages, has on
    its disk) to the round of the server's matching adapter.
    """
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
        address=record["address"],
        suite=record["suite"],
        server_key=record["server-key"],
        identity=Identity(record["run"], record["round"], record["node"]),
        ticket=Ticket(record["ticket"], record["secret"]),
    )


def models_of(message: Message) -> dict[str, int]:
    """Read the names and rounds of the models that a client evaluates, or keeps on its disk."""
    record: Any = message.content.config_records[LANE]
    return dict(zip(record["models"], record["rounds"], strict=True))


def to_arrays(state: Mapping[str, torch.Tensor]) -> ArrayRecord:
    """Copy tensors into an ArrayRecord as float32; the copies share no storage with the tensors."""
    return ArrayRecord(
        {name: Array(value.detach().float().cpu().numpy()) for name, value in state.items()}
    )


def from_arrays(record: ArrayRecord) -> State:
    """Copy an ArrayRecord into tensors that share no storage with the record."""
    # A reply's arrays may be in Fortran order, which safetensors can't write.
    return {
        name: torch.from_numpy(np.array(array.numpy(), order="C")) for name, array in record.items()
    }


def make_reply(
    message: Message,
    config: Mapping[str, Any],
    metrics: Mapping[str, int | float] | None = None,
    arrays: ArrayRecord | None = None,
) -> Message:
    """Create a reply.

    ``config`` contains at least the client's ``name``; the metrics of replies to train and evaluate
    messages include ``num-rows``; ``arrays`` is the adapter, or the importance J.
    """
    content = RecordDict({CONFIG: ConfigRecord(dict(config))})
    if metrics is not None:
        content[METRICS] = MetricRecord(dict(metrics))
    if arrays is not None:
        content[ARRAYS] = arrays
    return Message(content, reply_to=message)


def audit_of(message: Message) -> tuple[int, str] | None:
    """Return the number and digest of a reply's line in the client's audit log, or None."""
    if message.has_error() or not (record := message.content.config_records.get(AUDIT)):
        return None
    line, digest = record.get("line"), record.get("digest")
    if isinstance(line, int) and isinstance(digest, str) and len(digest) == 64:
        return line, one_line(digest)
    return None


def release_of(message: Message) -> dict[str, str]:
    """Return the verdict of a client's leak test, and its report's digest; empty without one."""
    config = config_of(message)
    verdict, digest = str(config.get("release", "")), str(config.get("leaks", ""))
    if verdict not in ("passed", "refused") or len(digest) != 64:
        return {}
    return {"verdict": verdict, "leaks": one_line(digest)}


def withheld_of(message: Message) -> str | None:
    """Return a line that says what a client withheld from a valid reply, and why, or None."""
    withheld = config_of(message).get("withheld")
    return one_line(str(withheld)) if withheld else None


def problem_of(message: Message) -> str | None:
    """Return the error that a reply reports, as one line, or None if it reports none."""
    if message.has_error():
        # Flower writes <class 'X'>:<'…'>; in simulation, "Message: " precedes the error's text.
        reason = str(message.error.reason).rpartition("Message: ")[2].strip()
        if reason.startswith("<class 'ray.exceptions.Actor"):
            return "the simulation's process that ran it was killed, or its host failed"
        return one_line(reason.removesuffix("'>")) or f"error {message.error.code}"
    problem = config_of(message).get("problem")
    return one_line(str(problem)) if problem else None


def config_of(message: Message) -> Mapping[str, Any]:
    """Return a reply's ``config`` record, or an empty mapping if the reply has none."""
    return {} if message.has_error() else message.content.config_records.get(CONFIG) or {}


def metrics_of(message: Message) -> Mapping[str, Any]:
    """Return a reply's metrics, or an empty mapping if the reply has none."""
    return {} if message.has_error() else message.content.metric_records.get(METRICS) or {}


@dataclass(frozen=True)
class Answer:
    """A model's answer to a held-out question; ``answers_record`` puts each text on one line."""

    model: str  # one of ``MODELS``
    question: str
    reference: str
    text: str  # the generated answer


_FIELDS = ("model", "question", "reference", "text")


def answers_record(answers: Sequence[Answer]) -> ConfigRecord:
    """Return answers as a ConfigRecord with one list for each field."""
    return ConfigRecord({f: [one_line(getattr(a, f)) for a in answers] for f in _FIELDS})


def answers_problem(reply: Message, most: int) -> str | None:
    """Return why a reply's answers are refused, or None; ``most`` is the limit for each model."""
    record: Any = reply.content.config_records.get(ANSWERS)
    if record is None:
        return None
    if not most:
        return "it sent answers that were not requested"
    columns = list(record.values())
    texts = all(isinstance(c, list) and all(isinstance(v, str) for v in c) for c in columns)
    if set(record) != set(_FIELDS) or not texts or len({len(column) for column in columns}) > 1:
        return "its answers are malformed: each must be a text with a question and a reference"
    models = record["model"]
    if not set(models) <= set(MODELS) or any(models.count(model) > most for model in MODELS):
        return f"it may send at most {most} answers from each of the models {', '.join(MODELS)}"
    return None


def answers_of(reply: Message) -> list[Answer]:
    """Return the answers in a reply that ``answers_problem`` accepted; the list may be empty."""
    record: Any = reply.content.config_records.get(ANSWERS) or {field: [] for field in _FIELDS}
    rows = zip(*(record[field] for field in _FIELDS), strict=True)
    return [Answer(*map(one_line, row)) for row in rows]


def answer_events(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return one ``metrics.jsonl`` event per model that generated answers."""
    by_model: dict[str, list[dict[str, str]]] = {model: [] for model in MODELS}
    for a in answers:
        own = {"question": a.question, "reference": a.reference, "text": a.text}
        by_model[a.model].append(own)
    return [{"event": "answers", "model": m, "answers": own} for m, own in by_model.items() if own]
