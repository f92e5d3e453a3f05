"""Register SuperNodes as clients of a run, by their replies to query messages."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from logging import INFO

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import Signer
from federation.flower_internals import NodeInfo
from federation.messages import (
    CONFIG,
    RANK,
    SIZE,
    TRAIN_EXAMPLES,
    Instruction,
    config_of,
    metrics_of,
    withheld_of,
)
from federation.run_config import RunConfig
from federation.sums.announcement import Announcement
from finetuning.errors import printable
from strategies.exchange import exchange, turns
from strategies.groups import announcement_of
from strategies.refusals import agreed, reason_to_refuse_registration
from strategies.silence import SilentClients


@dataclass(frozen=True)
class Participant:
    """A registered client."""

    node_id: int  # Flower's id of the client's SuperNode; it changes between simulated runs
    name: str  # chosen by the institution; unique in a run
    # Number of training rows, |Dᵢ| in FedJudge Eq. 2; 0 if only the name is known so far.
    examples: int
    # Number of training examples, which limits the number of steps; exceeds ``examples`` if a chat
    # template splits conversations.
    train_examples: int
    withholds: bool  # whether the client's policy withholds metrics and importance
    announcement: Announcement | None = None  # for masked sums
    rank: int = 0  # of its adapter, if ``adapter.ranks`` is set


class Registration:
    """Queries SuperNodes for their names, data sizes and base models.

    ``fingerprint`` contains the digests of the tensors that clients must have, as computed by the
    server. An unknown digest is empty, and is set to the digest that most clients report.
    ``agreed`` contains the agreed numbers of rows by name; None believes all data sizes.
    """

    def __init__(
        self,
        config: RunConfig,
        instruction: Instruction,
        fingerprint: dict[str, str],
        signer: Signer | None = None,
        agreed: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._signer = signer
        self.instruction = instruction
        self.fingerprint = dict(fingerprint)
        # Agreed numbers of rows of the clients whose keys were admitted under the names.
        self.agreed: dict[str, int] | None = None if agreed is None else {}
        self._agreements = agreed or {}
        # Names that the coordinator registered for the keys of the SuperNodes seen so far.
        self._assigned: dict[int, str] = {}

    def silent(self, grid: Grid, registered: Mapping[int, Participant]) -> SilentClients:
        """Watch for clients that don't reply to the messages that are sent now."""
        names = {node: participant.name for node, participant in registered.items()}
        return SilentClients(grid, self._config.node_timeout, names | self._assigned)

    def query(
        self,
        grid: Grid,
        nodes: Mapping[int, NodeInfo],
        wait: float,
        registered: Mapping[int, Participant],
        with_sizes: bool = False,
    ) -> tuple[dict[int, Participant], dict[str, str], set[int]]:
        """Query SuperNodes, and wait ``wait`` seconds for the replies.

        ``registered`` are the clients so far, by node. With ``sample`` < 1, simulated clients
        report their data sizes only if ``with_sizes``. Return the participants by node, the
        problems by name, and the nodes that did not answer.
        """
        name_only = self._config.sample < 1 and not with_sizes
        self._assigned |= {number: node.name for number, node in nodes.items() if node.name}
        instruction = replace(self.instruction, name_only=name_only).to_record()
        ttl = wait * turns(grid, len(nodes))
        queries = [
            Message(RecordDict({CONFIG: instruction}), node, MessageType.QUERY, ttl=ttl)
            for node in sorted(nodes)
        ]
        replies, silent = [], set(nodes)
        watched = self.silent(grid, registered)
        for reply in exchange(grid, queries, wait, self._signer, silent=watched):
            if not reply.has_error():
                for key in list(reply.content.array_records):  # queries request no arrays
                    del reply.content[key]
            replies.append(reply)
        # Without a node key, a restarted SuperNode has a new id but the same name.
        connected = set(grid.get_node_ids())
        names = {node: p.name for node, p in registered.items() if node in connected}
        participants: dict[int, Participant] = {}
        problems: dict[str, str] = {}
        self.fingerprint |= agreed([config_of(reply) for reply in replies], self.fingerprint)
        for reply in sorted(replies, key=_name):
            node, name = reply.metadata.src_node_id, _name(reply)
            silent.discard(node)
            if name in self._config.excluded:  # a simulated client; others have assigned names
                continue
            assigned = nodes[node].name
            reserved = {a for n, a in self._assigned.items() if n != node and a != assigned}
            taken = {other for n, other in names.items() if n != node} | reserved
            max_rank = self._config.adapter.rank if self._config.adapter.ranks else 0
            problem = reason_to_refuse_registration(
                reply, name, name_only, taken, assigned, self.fingerprint, max_rank
            )
            if problem is None:
                names[node] = name
                participants[node] = self._participant(reply, assigned)
            else:
                known = name or assigned or names.get(node, "")
                problems[_described(known, problems)] = printable(problem)
        for node in sorted(silent - registered.keys()):
            problems[_described(nodes[node].name, problems)] = f"no answer within {wait:g} s"
        return participants, problems, silent

    def _participant(self, reply: Message, assigned: str) -> Participant:
        """Return the sender of a valid reply, whose key was admitted as ``assigned``, if at all."""
        name, metrics = _name(reply), metrics_of(reply)
        examples = metrics.get(SIZE, 0)
        if self.agreed is not None and assigned in self._agreements:
            self.agreed[name] = self._agreements[assigned]
            log(INFO, "%d training rows are agreed on with %s", self.agreed[name], name)
        if examples:
            log(INFO, "%s takes part with %d training rows", name, examples)
        return Participant(
            node_id=reply.metadata.src_node_id,
            name=name,
            examples=examples,
            train_examples=metrics.get(TRAIN_EXAMPLES, examples),
            withholds=withheld_of(reply) is not None,
            announcement=announcement_of(reply, name),
            rank=metrics.get(RANK, 0),
        )


def _described(name: str, others: Collection[str]) -> str:
    """Describe a refused SuperNode without its id."""
    called = printable(name, 64) if name else "a SuperNode without a name"
    same = sum(other == called or other.startswith(f"{called} (") for other in others)
    return f"{called} ({same + 1})" if same else called


def _name(reply: Message) -> str:
    return str(config_of(reply).get("name", ""))
