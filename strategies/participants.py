"""The clients of a run: wait for SuperNodes, register clients by name, and address messages."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from logging import INFO, WARNING
from random import Random

from flwr.app import Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from federation.flower_internals import InMemoryGrid, NodeInfo
from federation.names import folded
from federation.run_config import RunConfig
from federation.sums.announcement import Group
from finetuning.randomness import derive_seed
from strategies.exchange import turns
from strategies.groups import complete_groups, groups_of
from strategies.registration import Participant, Registration
from strategies.silence import SilentClients

_POLL_SECONDS = 1.0
# Maximum number of queries to a silent SuperNode; each query delays a round by node-timeout.
_MAX_QUERIES = 3

Nodes = Mapping[int, NodeInfo]  # connected SuperNodes by id


class TooFewClientsError(RuntimeError):
    """Fewer than ``min-nodes`` clients are connected or have sent valid replies."""


class RefusedError(RuntimeError):
    """The run can't start or continue; the message states the reasons and what to do."""


def _wait_for_nodes(grid: Grid, config: RunConfig, count: Callable[[Nodes], int] = len) -> Nodes:
    """Wait until ``min-nodes`` SuperNodes are connected; return all that are connected.

    ``count`` returns how many of the connected SuperNodes count; it may query them first. Those
    whose registered name is excluded don't count. Raise ``TooFewClientsError`` if fewer are
    connected after ``node-timeout`` seconds.
    """
    minimum, timeout = config.min_nodes, config.node_timeout
    end = time.monotonic() + timeout
    announced = -1
    while True:
        is_over = time.monotonic() >= end  # queries may use up the time; look once more after them
        nodes = {n.node_id: n for n in grid.get_nodes() if n.name not in config.excluded}
        found = count(nodes)
        if found >= minimum:
            return nodes
        refused = f", besides {len(nodes) - found} refused ones" if len(nodes) > found else ""
        if is_over:
            raise TooFewClientsError(
                f"{found} SuperNodes were connected after {timeout:g} s (node-timeout){refused}, "
                f"but min-nodes = {minimum} are required; start more SuperNodes (in simulation: "
                f"--federation-config num-supernodes={minimum}), or lower min-nodes"
            )
        if found != announced:
            text = "Waiting for SuperNodes: %d of %d are connected%s"
            log(INFO, text, found, minimum, refused)
            announced = found
        time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))


class Participants:
    """The registered clients of a run, and the recipients of the last messages."""

    def __init__(self, config: RunConfig, registration: Registration) -> None:
        self._config = config
        self._registration = registration
        self._registered: dict[int, Participant] = {}
        # Data sizes of the recipients of the last messages, keyed and sorted by name.
        self.asked: dict[str, int] = {}
        # With masked sums, the groups of the recipients of the last messages, keyed by member.
        self.groups: dict[str, Group] = {}
        # Why other clients aren't among the recipients of the last messages.
        self._absent: dict[str, str] = {}
        # Time at which each queried SuperNode connected; None to query it again.
        self._queried: dict[int, str | None] = {}
        # Number of unanswered queries of each SuperNode.
        self._unanswered: Counter[int] = Counter()
        self._refused: set[int] = set()  # SuperNodes that can't take part

    def register_all(self, grid: Grid) -> None:
        """Register every SuperNode before training starts.

        With ``sample`` < 1, simulated clients register by name; then those that will evaluate also
        prepare their rows, so that errors in the settings are found before training.

        Raise ``TooFewClientsError`` if not enough SuperNodes connect in time, or ``RefusedError``
        if at least one client can't take part.
        """
        nodes = _wait_for_nodes(grid, self._config)
        wait = self._config.reply_timeout
        self._registered, problems, _ = self._registration.query(grid, nodes, wait, {})
        self._queried = _connected_since(nodes)
        problems |= self._prepare(grid, self._drawn(self._registered.values(), 0))
        if problems:
            lines = "".join(f"\n  {name}: {problem}" for name, problem in problems.items())
            raise RefusedError(f"training can't start:{lines}")
        log(INFO, "%d clients take part", len(self._registered))
        minimum = self._config.min_nodes
        is_simulated = isinstance(grid, InMemoryGrid)
        is_whole = self._config.sampled(len(self._registered)) == minimum > 1
        if is_whole and not is_simulated and not self._config.sums.enabled:
            text = (
                "All %d clients of a round are needed (min-nodes): if one fails to reply, the run "
                "ends. With min-nodes = %d, it continues without that client"
            )
            log(WARNING, text, minimum, minimum - 1)

    def register_newcomers(self, grid: Grid, finished_rounds: int) -> dict[str, str]:
        """Register SuperNodes that connected later; a failing SuperNode doesn't affect the others.

        A SuperNode that reconnected with the same id is queried again, because its data or name may
        have changed; if it doesn't answer or can't take part, its registration remains valid.
        Refused SuperNodes are queried again after a registered SuperNode has disconnected, since it
        may have had the name of one of them. A SuperNode that doesn't answer, perhaps because it is
        preparing a large model, is queried again later, at most three times in all.

        Wait until ``min-nodes`` SuperNodes are connected that were not refused. Return the reasons
        for refusing clients, keyed by name. Raise ``TooFewClientsError`` after ``node-timeout``.
        """
        problems: dict[str, str] = {}

        def count(nodes: Nodes) -> int:
            problems.update(self._query_newcomers(grid, nodes, finished_rounds))
            return len(nodes.keys() - self._refused)

        _wait_for_nodes(grid, self._config, count)
        return problems

    def _query_newcomers(self, grid: Grid, nodes: Nodes, finished_rounds: int) -> dict[str, str]:
        """Query new SuperNodes, and register those that can take part; return others' reasons."""
        since = _connected_since(nodes)
        gone = self._registered.keys() & self._queried.keys() - nodes.keys()
        newcomers = {
            n: node
            for n, node in nodes.items()
            if self._queried.get(n) != since[n] or (gone and n not in self._registered)
        }
        self._queried = since
        if not newcomers:
            return {}
        self._registration.instruction = replace(
            self._registration.instruction, round=finished_rounds
        )
        joined, problems, silent = self._registration.query(
            grid, newcomers, self._config.node_timeout, self._registered
        )
        self._unanswered.update(silent)
        for node in silent:
            if self._unanswered[node] < _MAX_QUERIES:
                self._queried[node] = None
        # If a client has a new SuperNode id, drop the old id, so that the client isn't asked twice.
        names = {folded(p.name) for p in joined.values()}
        self._registered = {
            node: p for node, p in self._registered.items() if folded(p.name) not in names
        } | joined
        self._refused -= newcomers.keys()
        self._refused |= newcomers.keys() - self._registered.keys() - silent
        for name, problem in problems.items():
            log(WARNING, "%s can't join: %s", name, problem)
        return problems

    @property
    def all_withhold(self) -> bool:
        """Whether the policies of all connected clients that evaluate withhold importance."""
        connected = [p for p in self._registered.values() if p.name not in self._absent]
        return bool(connected) and all(p.withholds for p in self._drawn(connected, 0))

    def recipient_of(self, message: Message) -> Participant:
        """Return the recipient of a message."""
        return self._registered[message.metadata.dst_node_id]

    def silent(self, grid: Grid) -> SilentClients:
        """Watch for clients that don't reply to the messages that are sent now."""
        return self._registration.silent(grid, self._registered)

    def sender_of(self, reply: Message) -> Participant | None:
        """Return the sender of a reply, or None if it isn't registered."""
        return self._registered.get(reply.metadata.src_node_id)

    def address(
        self,
        message_type: str,
        content: RecordDict,
        grid: Grid,
        draw: int,
    ) -> Iterator[Message]:
        """Create a message for every connected participant or, with ``sample``, for some of them.

        Calls with equal ``draw`` select the same participants. Messages are sorted by name or, in
        serial training, shuffled unless ``split.order`` is ``names``.

        The recipients are recorded immediately. Each message is created when the iterator reaches
        it, because its time to live begins then. Records may be added to each message separately.
        """
        connected = [self._registered[n] for n in grid.get_node_ids() if n in self._registered]
        absent = sorted({p.name for p in self._registered.values()} - {p.name for p in connected})
        drawn = self._drawn(connected, draw)
        self._absent = dict.fromkeys(absent, "its SuperNode is not connected")
        self._absent |= self._prepare(grid, drawn)
        prepared = [p for p in (self._registered[p.node_id] for p in drawn) if p.examples]
        if self._config.sums.enabled:
            announced = {p.name: p.announcement for p in prepared if p.announcement}
            names = {p.name for p in connected}
            found = complete_groups(
                self._groups(), names, announced, self._registration.agreed or {}
            )
            self.groups, absent_groups = found
            self._absent |= absent_groups
            prepared = [p for p in prepared if p.name in self.groups]
        self.asked = {p.name: p.examples for p in prepared}
        ttl = self._config.reply_timeout * turns(grid, len(prepared))
        if message_type == MessageType.TRAIN and self._config.late_replies:
            ttl *= 2  # the reply can arrive until the end of the evaluation
        nodes = [p.node_id for p in prepared]
        is_shuffled = self._config.takes_turns and self._config.split.order == "shuffled"
        if message_type == MessageType.TRAIN and is_shuffled:
            Random(derive_seed("order", self._config.seed, draw)).shuffle(nodes)
        return (Message(RecordDict(dict(content)), node, message_type, ttl=ttl) for node in nodes)

    def _drawn(self, connected: Collection[Participant], draw: int) -> list[Participant]:
        """Draw the share ``sample`` of the participants, at least ``min-nodes``, sorted by name.

        With masked sums, whole groups are drawn.
        """
        seed = self._config.seed
        if self._config.sums.enabled:
            by_name = {p.name: p for p in connected}
            groups = [group for group in self._groups() if by_name.keys() >= set(group)]
            groups.sort(key=lambda group: derive_seed("sample", seed, draw, *group))
            needed, names = self._config.sampled(len(connected)), list[str]()
            while groups and len(names) < needed:
                names += groups.pop(0)
            return [by_name[name] for name in sorted(names)]
        # Each client has its own random number: others that join or leave hardly change the draw.
        drawn = sorted(connected, key=lambda p: derive_seed("sample", seed, draw, p.name))
        count = self._config.sampled(len(drawn))
        return sorted(drawn[:count], key=lambda p: p.name)

    def _groups(self) -> list[list[str]]:
        return groups_of(self._config, [p.name for p in self._registered.values()])

    def missing(self, answered: Collection[str]) -> dict[str, str]:
        """Return the clients that haven't answered, with the reasons."""
        silent = f"no reply within {self._config.round_timeout:g} s (round-timeout)"
        return self._absent | {name: silent for name in self.asked if name not in answered}

    def _prepare(self, grid: Grid, drawn: Iterable[Participant]) -> dict[str, str]:
        """Query clients that have registered by name for their data sizes.

        Return the reasons why clients can't take part, keyed by name.
        """
        names = {p.node_id: p.name for p in drawn if not p.examples}
        if not names:
            return {}
        nodes = {node.node_id: node for node in grid.get_nodes() if node.node_id in names}
        wait = self._config.reply_timeout
        prepared, problems, silent = self._registration.query(
            grid, nodes, wait, self._registered, with_sizes=True
        )
        self._registered |= prepared
        return problems | {names[node]: f"no answer within {wait:g} s" for node in silent}


def _connected_since(nodes: Nodes) -> dict[int, str | None]:
    return {number: node.last_activated_at for number, node in nodes.items()}
