"""FL-GLM: clients hold the first and last blocks, the server trains the blocks between."""

import ipaddress
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from finetuning.model.fingerprint import PARTIES_SHARE
from finetuning.randomness import derive_seed
from split.model.adapters import join_adapters, take_apart
from split.model.cut import PartyName, cut_of
from split.model.devices import body_devices
from split.model.exactness import check_exactness
from split.model.loading import load_parts, locate_parts, tensors_of
from split.server.block_server import BlockServer
from strategies.journal import Journal
from strategies.messages import BODY, LANE, State, from_arrays, lane_record, to_arrays
from strategies.roster import RefusedError
from strategies.rounds import Progress, Rounds, underscored
from strategies.run_config import RunConfig


class FLGLM(Rounds):
    """FL-GLM with serial or hierarchical training (section 3.3).

    Flower's messages bring the adapters of heads and tails, once per round, and invitations to
    lanes; the adapters of the blocks between are here.

    Args:
        config: the run's configuration.
        fingerprint: of the base model, as far as the server has it.
        progress: where to start.
        journal: written to as the run goes on.

    """

    def __init__(
        self, config: RunConfig, fingerprint: dict[str, str], progress: Progress, journal: Journal
    ) -> None:
        self._directory = locate_parts(config.model.name, config.split, ("body",))
        self._cut = cut_of(self._directory, config.split)
        theirs = tensors_of(self._directory, self._cut, ("head", "tail"))
        # What the server has no file of, clients compare with each other.
        expected = {name: fingerprint[name] for name in PARTIES_SHARE if name in fingerprint}
        expected |= {name: fingerprint.get(name, "") for name in sorted(theirs)}
        super().__init__(config, expected, progress, journal)
        self._server: BlockServer
        self._body: State = {}
        self._bodies: dict[str, tuple[int, State | None]] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that are left; see ``Rounds.start``.

        Args:
            grid: connects to the SuperNodes.
            initial_arrays: the whole global adapter after ``progress.finished_rounds``.
            num_rounds: counted from the beginning of the run, finished ones included.
            timeout: seconds to wait for replies.
            train_config: not used.
            evaluate_config: not used.
            evaluate_fn: not used.

        Raises:
            RefusedError: tickets would travel in clear text, or clients can't take part.
            TooFewClientsError: fewer than ``min-nodes`` are there or gave valid replies.

        """
        parts = take_apart(from_arrays(initial_arrays), self._cut)
        self._body = parts["body"]
        self._server = self._serve_blocks(grid, parts)
        try:
            return super().start(
                grid, to_arrays(parts["head"] | parts["tail"]), num_rounds, timeout
            )
        finally:
            self._server.stop()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every connected client to train, each with an invitation of its own.

        With the serial schedule messages must be sent one at a time, as they are made.
        """
        messages = super().configure_train(server_round, arrays, config, grid)
        if server_round > 1 and (server_round - 1) % self.config.split.rotate_keys_every == 0:
            self._server.rotate_keys()
        seed = derive_seed("stack", self.config.seed, server_round)
        self._server.begin_round(self._roster.asked, seed)
        for message in messages:
            client = self._roster.name_of(message)
            seed = derive_seed("train", self.config.seed, client, server_round)
            invitation = self._server.invite_to_train(
                client, server_round, seed, self.config.reply_timeout
            )
            message.content[LANE] = lane_record(invitation)
            yield message

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every connected client for what is due, each with an invitation of its own.

        After the last round each takes home the adapters of the body, too.
        """
        final = self._evaluation(server_round).final
        for message in super().configure_evaluate(server_round, arrays, config, grid):
            client = self._roster.name_of(message)
            bodies = self._bodies_of(client, server_round)
            states = {model: state for model, (_, state) in bodies.items()}
            invitation = self._server.invite_to_evaluate(
                client, server_round, states, self.config.reply_timeout
            )
            rounds = {model: number for model, (number, _) in bodies.items()}
            message.content[LANE] = lane_record(invitation, rounds)
            if final:
                for model, state in states.items():
                    message.content[BODY[model]] = to_arrays(state or {})
            yield message

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average heads and tails by data size, and what the schedule averages of the body."""
        self._end_lanes(server_round)
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Record each client's metrics; give their averages by data size."""
        self._end_lanes(server_round)
        return super().aggregate_evaluate(server_round, replies)

    def _serve_blocks(self, grid: Grid, parts: Mapping[PartyName, State]) -> BlockServer:
        """Load the body, and start to listen."""
        started = time.monotonic()
        prefixes = self.config.adapter.kind == "prefix"
        check_exactness(
            self._directory, self.config.model, self._cut, prefixes, self.config.evaluate.generate
        )
        devices = body_devices(self.config.split)
        loaded = load_parts(self.config.model, self._directory, self._cut, ("body",), devices)
        server = BlockServer(
            body=loaded["body"],
            state=parts,
            split=self.config.split,
            adapter=self.config.adapter,
            train=self.config.train,
            run=self.progress.lineage,
            rounds=self.config.rounds,
            longest=self.config.longest,
            minimum=self.config.min_nodes,
            most_kept=self.config.most_generated,
        )
        try:
            _refuse_clear_text(grid, server.address)
            if self.progress.optimizers:
                server.load_optimizers(self.progress.optimizers)
        except BaseException:
            server.stop()
            raise
        seconds = time.monotonic() - started
        blocks = self._cut.range_of("body")
        log(
            INFO,
            "Blocks %d to %d are served at %s after %.1f s",
            blocks.start,
            blocks.stop - 1,
            server.address,
            seconds,
        )
        return server

    def _exchange(self, messages: Iterable[Message], grid: Grid, timeout: float) -> list[Message]:
        """With the serial schedule each client's turn begins when the one before has replied."""
        if self.config.split.schedule != "serial":
            return super()._exchange(messages, grid, timeout)
        replies = []
        for message in messages:
            replies += super()._exchange([message], grid, timeout)
            # Whoever is late can't hold up the next turn.
            self._end_lanes(self.progress.finished_rounds + 1)
        return replies

    def _end_lanes(self, server_round: int) -> None:
        for account in self._server.finish_lanes():
            event = {underscored(k): v for k, v in asdict(account).items()}
            self._journal.record({"event": "lane", "round": server_round, **event})

    def _bodies_of(self, client: str, server_round: int) -> dict[str, tuple[int, State | None]]:
        """Give the body's adapters of each model that a client evaluates, and their rounds."""
        if server_round == 0:
            return {"base": (0, None)}
        if client not in self._bodies and (kept := self._journal.personalised(client)):
            # Of a run that goes on: whoever took part in its last round has this of that round.
            self._bodies[client] = (server_round, take_apart(kept, self._cut)["body"])
        own = {"personalised": self._bodies[client]} if client in self._bodies else {}
        return {"global": (server_round, self._body), **own}

    def _whole(self, averaged: State) -> State:
        return join_adapters([averaged, self._body])

    def _personalised(self, client: str, local: State) -> State:
        body = self._server.state_of(client)
        self._bodies[client] = (self.progress.finished_rounds + 1, body)
        return join_adapters([local, body])

    def _average(self, weights: Mapping[str, int]) -> None:
        self._body = self._server.end_round(weights)
        optimizers = self._server.export_optimizers()
        self.progress = replace(self.progress, optimizers=optimizers or None)


def _refuse_clear_text(grid: Grid, address: str) -> None:
    """Refuse to send tickets over a connection that isn't encrypted, unless all is one machine.

    All of a SuperLink's interfaces share one port, so that its ServerApp's connection to it is
    encrypted if and only if the SuperNodes' are.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if getattr(grid, "_insecure", False) and not loopback:
        raise RefusedError(
            f"clients would get their tickets to the block server at {address} over Flower's "
            "connections, which are not encrypted; start the SuperLink with --ssl-certfile, "
            "--ssl-keyfile and --ssl-ca-certfile, or listen on 127.0.0.1"
        )
