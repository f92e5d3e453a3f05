"""Who takes part: SuperNodes are waited for, asked who they are, and known by name from then on."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from finetuning.model.fingerprint import differences, digest
from strategies.messages import CONFIG, NAME, SIZE, Instruction, config_of, metrics_of, problem_of
from strategies.refusals import reason_to_refuse
from strategies.run_config import RunConfig

_POLL_SECONDS = 1.0
# In bytes: of a folder's name on most file systems, and of a name in a lane's handshake.
_LONGEST_NAME = 255


class TooFewClientsError(RuntimeError):
    """Fewer clients than ``min-nodes`` are there, or gave valid replies."""


class RefusedError(RuntimeError):
    """Clients can't take part as they are; the message names each with what to do."""


@dataclass(frozen=True)
class Participant:
    """A client that may take part.

    Attributes:
        node_id: Flower's id of its SuperNode; it changes from run to run in simulation.
        name: chosen by the institution; unique in a run.
        examples: how many training examples it has, |Dᵢ| of FedJudge Eq. 2.

    """

    node_id: int
    name: str
    examples: int


def wait_for_nodes(grid: Grid, minimum: int, timeout: float) -> list[int]:
    """Wait until ``minimum`` SuperNodes are connected, and give all that are.

    Raises:
        TooFewClientsError: they aren't within ``timeout`` seconds.

    """
    end = time.monotonic() + timeout
    announced = -1
    while len(nodes := sorted(grid.get_node_ids())) < minimum:
        if time.monotonic() >= end:
            raise TooFewClientsError(
                f"{len(nodes)} SuperNodes were connected after {timeout:g} s (node-timeout), and "
                f"min-nodes = {minimum} are needed; start more SuperNodes (in simulation: "
                f"--federation-config num-supernodes={minimum}), or lower min-nodes"
            )
        if len(nodes) != announced:
            log(INFO, "Waiting for SuperNodes: %d of %d are connected", len(nodes), minimum)
            announced = len(nodes)
        time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
    return nodes


class Roster:
    """The clients of a run, and whom the last messages went to: silence must be noticed.

    Args:
        config: the run's limits on numbers and times.
        instruction: with the run's lineage and base model.
        fingerprint: of what clients must have of the base model, as the server computed it. A
            digest that it doesn't know is empty, and becomes that of the first client.

    """

    def __init__(
        self, config: RunConfig, instruction: Instruction, fingerprint: dict[str, str]
    ) -> None:
        self._config = config
        self._instruction = instruction
        self.fingerprint = dict(fingerprint)
        self._participants: dict[int, Participant] = {}
        self._asked: dict[int, str] = {}
        self._absent: list[str] = []
        self._refused: set[int] = set()

    @property
    def base(self) -> str:
        """Digest of what clients have of the base model."""
        return digest(self.fingerprint)

    def enrol_all(self, grid: Grid) -> None:
        """Meet everyone before anything is trained; whoever has a problem stops the run.

        Raises:
            TooFewClientsError: not enough SuperNodes connect in time.
            RefusedError: clients can't take part as they are.

        """
        nodes = wait_for_nodes(grid, self._config.min_nodes, self._config.node_timeout)
        self._participants, problems = self._ask_who(grid, nodes, self._config.reply_timeout)
        if problems:
            lines = "".join(f"\n  {name}: {problem}" for name, problem in problems.items())
            raise RefusedError(f"training can't start:{lines}")
        for participant in sorted(self._participants.values(), key=lambda p: p.name):
            log(INFO, "%s takes part with %d examples", participant.name, participant.examples)

    def enrol_newcomers(self, grid: Grid) -> None:
        """Meet SuperNodes that connected later; one with a problem doesn't stop the others.

        Raises:
            TooFewClientsError: not enough SuperNodes are connected, or become so in time.

        """
        nodes = wait_for_nodes(grid, self._config.min_nodes, self._config.node_timeout)
        # One that couldn't join is asked again when it has connected anew, and not every round.
        self._refused &= set(nodes)
        newcomers = set(nodes) - self._participants.keys() - self._refused
        if not newcomers:
            return
        joined, problems = self._ask_who(grid, newcomers, self._config.node_timeout)
        self._participants |= joined
        self._refused |= newcomers - joined.keys()
        for participant in joined.values():
            log(INFO, "%s joins with %d examples", participant.name, participant.examples)
        for name, problem in problems.items():
            log(WARNING, "%s can't join: %s", name, problem)

    @property
    def asked(self) -> dict[str, int]:
        """Names and data sizes of those whom the last messages went to, in the order of names."""
        sizes = {p.name: p.examples for p in self._participants.values()}
        return {name: sizes[name] for name in sorted(self._asked.values())}

    def name_of(self, message: Message) -> str:
        """Give the name of the client that a message goes to."""
        return self._participants[message.metadata.dst_node_id].name

    def address(self, message_type: str, content: RecordDict, grid: Grid) -> Iterator[Message]:
        """Make a message to every participant that is connected, in the order of names.

        Whom it goes to is remembered at once. Each message is made when it is taken, since its
        time to live begins then, and has a record of its own, so that more can be put into it.
        """
        nodes = [node for node in grid.get_node_ids() if node in self._participants]
        self._asked = {node: self._participants[node].name for node in nodes}
        known = {participant.name for participant in self._participants.values()}
        self._absent = sorted(known - set(self._asked.values()))
        nodes = sorted(self._asked, key=lambda node: self._asked[node])
        ttl = self._config.reply_timeout
        return (Message(RecordDict(dict(content)), node, message_type, ttl=ttl) for node in nodes)

    def screen(
        self, replies: Iterable[Message], reference: ArrayRecord | None, minimum: float = -math.inf
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """Tell usable replies from others.

        Args:
            replies: to the messages that were addressed last.
            reference: names and shapes that each reply's arrays must have; None if it has none.
            minimum: of the arrays' values.

        Returns:
            Valid replies by client, and the reasons for leaving others out by client, both in the
            order of names, so that sums don't depend on who was first.

        """
        arrived = {reply.metadata.src_node_id: reply for reply in replies}
        valid: dict[str, Message] = {}
        left_out = dict.fromkeys(self._absent, "its SuperNode is not connected")
        for node, name in sorted(self._asked.items(), key=lambda item: item[1]):
            if node not in arrived:
                limit = self._config.round_timeout
                reason: str | None = f"no reply within {limit:g} s (round-timeout)"
            else:
                reason = reason_to_refuse(arrived[node], name, self.base, reference, minimum)
            if reason is None:
                valid[name] = arrived[node]
            else:
                left_out[name] = reason
        for name, reason in left_out.items():
            log(WARNING, "%s is left out: %s", name, reason)
        return valid, dict(sorted(left_out.items()))

    def _ask_who(
        self, grid: Grid, nodes: Iterable[int], wait: float
    ) -> tuple[dict[int, Participant], dict[str, str]]:
        """Ask nodes for name, data and base model; give participants, and problems by name."""
        content = RecordDict({CONFIG: self._instruction.to_record()})
        asked = set(nodes)
        replies = grid.send_and_receive(
            [Message(content, node, MessageType.QUERY, ttl=wait) for node in sorted(asked)],
            timeout=wait,
        )
        # A SuperNode that was restarted comes back under a new id and its old name.
        connected = set(grid.get_node_ids())
        names = {p.name for p in self._participants.values() if p.node_id in connected}
        participants: dict[int, Participant] = {}
        problems: dict[str, str] = {}
        for reply in sorted(replies, key=_name):
            node, name = reply.metadata.src_node_id, _name(reply)
            asked.discard(node)
            problem = problem_of(reply) or _odd_identity(reply, name, names, self.fingerprint)
            if problem is None:
                names.add(name)
                config = config_of(reply)
                self.fingerprint |= dict(zip(config["tensors"], config["digests"], strict=True))
                participants[node] = Participant(node, name, metrics_of(reply)[SIZE])
            else:
                problems[f"{name} (node {node})" if name else f"node {node}"] = problem
        for node in sorted(asked):
            problems[f"node {node}"] = f"no answer within {wait:g} s"
        return participants, problems


def _name(reply: Message) -> str:
    return str(config_of(reply).get("name", ""))


def _odd_identity(
    reply: Message, name: str, names: set[str], fingerprint: dict[str, str]
) -> str | None:
    """Say what is wrong with an answer; names come from outside and become folder names."""
    if not NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
        return f"the name {name!r} must be letters, digits, spaces, '.', '_' or '-' (at most 64)"
    if name in names:
        return f"another SuperNode is named {name!r} already; give each a name of its own"
    config, size = config_of(reply), metrics_of(reply).get(SIZE)
    if not isinstance(size, int) or size <= 0:
        return f"its {SIZE} is {size!r}, and must be a positive whole number"
    tensors, digests = config.get("tensors"), config.get("digests")
    if not isinstance(tensors, list) or not isinstance(digests, list):
        return "it doesn't say which base model it has"
    theirs = dict(zip(tensors, digests, strict=False))
    ours = {k: v or theirs.get(k, v) for k, v in fingerprint.items()}
    odd = differences(ours, theirs)
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        return (
            f"its base model is not the run's: {', '.join(odd[:3])}{more} differ; give it the same "
            "checkpoint"
        )
    return None
