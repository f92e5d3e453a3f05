"""FL-GLM: clients train the first and last blocks; the server trains the middle blocks."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import Signer
from federation.messages import BODY, LANE, from_arrays, lane_record, to_arrays
from federation.run_config import RunConfig
from federation.run_folder import LaneStatus
from finetuning.adapters.adapter import State
from finetuning.errors import printable
from finetuning.model.fingerprint import PARTIES_SHARE
from finetuning.randomness import derive_seed
from split.address import is_loopback
from split.model.adapters import join_adapters, take_apart
from split.model.exactness import check_exactness
from split.model.loading import locate_parts, tensors_of
from split.model.partition import PartyName, partition_of
from split.server.block_server import BlockServer
from split.server.body import divide_body, load_body
from strategies.journal import Journal, Progress, record_scaled, underscored
from strategies.participants import RefusedError
from strategies.replies import Replies
from strategies.rounds import Rounds


class FLGLM(Rounds):
    """FL-GLM with serial, client-batch or hierarchical training (section 3.3).

    In each round, Flower's messages contain the adapters of heads and tails, and invitations to
    lanes. The adapters of the middle blocks remain at the server until the last round has ended.
    """

    def __init__(
        self,
        config: RunConfig,
        fingerprint: dict[str, str],
        progress: Progress,
        journal: Journal,
        signer: Signer | None = None,
        agreed: Mapping[str, int] | None = None,
    ) -> None:
        self._directory = self.locate_base_model(config)
        self._partition = partition_of(self._directory, config.split)
        theirs = tensors_of(self._directory, self._partition, ("head", "tail"))
        # Tensors that the server lacks have empty digests: the clients must agree on these.
        expected = {name: fingerprint[name] for name in PARTIES_SHARE if name in fingerprint}
        expected |= {name: fingerprint.get(name, "") for name in sorted(theirs)}
        super().__init__(config, expected, progress, journal, signer, agreed)
        self._server: BlockServer
        self._body: State = {}
        # For each client, why its training lane ended early in this round; empty if it didn't.
        self._ends: dict[str, str] = {}

    @staticmethod
    def locate_base_model(config: RunConfig) -> Path:
        """Return the folder of the middle blocks; raise ``BaseModelError`` if they are missing."""
        return locate_parts(config.model.name, config.split, ("body",))

    @contextmanager
    def _prepared(self, grid: Grid, arrays: ArrayRecord) -> Iterator[ArrayRecord]:
        """Serve the body during a run; yield the adapters of the head and tail.

        Raise ``RefusedError`` if tickets would be sent unencrypted.
        """
        parts = take_apart(from_arrays(arrays), self._partition)
        self._body = parts["body"]
        self._server = self._serve_body(parts)
        try:
            _refuse_clear_text(grid, self._server.address)
            if self.progress.optimizers:
                self._server.load_optimizers(self.progress.optimizers)
            yield to_arrays(parts["head"] | parts["tail"])
        finally:
            self._server.stop()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Create a train message with an invitation for every client of the round.

        With the serial schedule, each message must be sent before the next one is created.
        """
        messages = super().configure_train(server_round, arrays, config, grid)
        if server_round > 1 and (server_round - 1) % self.config.split.rotate_keys_every == 0:
            self._server.rotate_keys()
        seed = derive_seed("stack", self.config.seed, server_round)
        asked = self._participants.asked
        counted, caps = self._averaging.counted(asked), self._averaging.caps(asked)
        self._server.begin_round(counted, seed, from_arrays(arrays), caps)
        self._ends = {}
        for message in messages:
            client = self._participants.recipient_of(message)
            invitation = self._server.invite_to_train(
                client.name,
                round_number=server_round,
                seed=derive_seed("train", self.config.seed, client.name, server_round),
                lifetime=message.metadata.ttl,
                examples=client.train_examples,
            )
            # The client must not delete the head and tail that match this body, however old.
            own = self._journal.personalised(client.name)
            message.content[LANE] = lane_record(invitation, {"personalised": own[0]} if own else {})
            yield message

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Create an evaluate message with an invitation for every client that evaluates.

        After the last round, messages also contain the adapters of the body.
        """
        final = self._evaluation(server_round).final
        for message in super().configure_evaluate(server_round, arrays, config, grid):
            client = self._participants.recipient_of(message).name
            # For each model that the client evaluates, the round and the body's adapter.
            bodies: dict[str, tuple[int, State | None]] = {}
            if server_round == 0:
                bodies["base"] = (0, None)
            if server_round > 0 or self.config.initial_adapter:
                bodies["global"] = (server_round, self._body)
            if server_round > 0 and (own := self._journal.personalised(client)):
                bodies["personalised"] = (own[0], take_apart(own[1], self._partition)["body"])
            states = {model: state for model, (_, state) in bodies.items()}
            invitation = self._server.invite_to_evaluate(
                client, round_number=server_round, models=states, lifetime=message.metadata.ttl
            )
            rounds = {model: number for model, (number, _) in bodies.items()}
            message.content[LANE] = lane_record(invitation, rounds)
            if final:
                for model, state in states.items():
                    message.content[BODY[model]] = to_arrays(state or {})
            yield message

    def _serve_body(self, parts: Mapping[PartyName, State]) -> BlockServer:
        """Load the body and start the block server."""
        started = time.monotonic()
        config = self.config
        prefixes, generation = config.adapter.kind == "prefix", config.evaluate.generate
        for partition in divide_body(self._partition, config.split).values():
            check_exactness(self._directory, config.model, partition, prefixes, generation)
        server = BlockServer(
            body=load_body(self._directory, config.model, config.split),
            state=parts,
            split=config.split,
            adapter=config.adapter,
            train=config.train,
            run=self.progress.lineage,
            rounds=config.rounds,
            max_batch_tokens=config.max_batch_tokens,
            max_columns=config.data.max_length,
            minimum=config.min_nodes,
            max_cached_tokens=config.max_generated_tokens,
        )
        blocks = self._partition.range_of("body")
        seconds = time.monotonic() - started
        text = "Serving blocks %d to %d at %s; loading took %.1f s"
        log(INFO, text, blocks.start, blocks.stop - 1, server.address, seconds)
        return server

    def _exchange(
        self, messages: Iterable[Message], grid: Grid, timeout: float, training: bool
    ) -> Iterator[Message]:
        """Send messages, and yield replies; after the last reply, end the lanes still open.

        In training, the serial schedule waits for each reply before it sends the next message, and
        ends a late client's lane, so that this client can't delay the next one.
        """
        serial = training and self.config.takes_turns
        for group in ([message] for message in messages) if serial else [messages]:
            if serial:
                self._phases.status.extend(timeout)
            for reply in super()._exchange(group, grid, timeout, training):
                if sender := self._participants.sender_of(reply):
                    # Otherwise, schedules that start clients together would wait for this one.
                    self._server.mark_absent(sender.name)
                yield reply
                del reply  # release its memory before the next reply is pulled
            for account in self._server.finish_lanes():
                if account.purpose == "train":
                    self._ends[account.client] = account.error
                event = {underscored(k): v for k, v in asdict(account).items()}
                event["error"] = printable(account.error)  # may quote the client
                round_number = self.progress.finished_rounds + training
                self._journal.record({"event": "lane", "round": round_number, **event})

    def _lanes(self) -> list[LaneStatus]:
        return [
            LaneStatus(client=client, steps=steps, planned=planned, tokens=tokens)
            for client, steps, planned, tokens in self._server.progress()
        ]

    def _unfinished(self, replied: Collection[str]) -> dict[str, str]:
        # A correct client replies only after the server has confirmed its last step.
        ends = {name: self._ends.get(name, "it opened no lane") for name in replied}
        return {
            name: f"it replied, but did not finish its training: {printable(reason)}"
            for name, reason in ends.items()
            if reason
        }

    def _whole(self, averaged: State) -> State:
        return join_adapters([averaged, self._body])

    def _personalised(self, client: str, replies: Replies) -> State:
        return join_adapters([replies.state(client), self._server.state_of(client)])

    def _average_at_server(self, weights: Mapping[str, int]) -> None:
        self._body = self._server.end_round(weights)
        number = self.progress.finished_rounds + 1
        record_scaled(self._journal, number, "update at the server", self._server.scaled)
        self.progress = replace(self.progress, optimizers=self._server.export_optimizers() or None)


def _refuse_clear_text(grid: Grid, address: str) -> None:
    """Raise ``RefusedError`` if tickets would be sent unencrypted to other machines.

    All APIs of a SuperLink share one port, so the ServerApp's connection is encrypted if and only
    if the SuperNodes' connections are.
    """
    if getattr(grid, "_insecure", False) and not is_loopback(address):
        raise RefusedError(
            f"tickets for the block server at {address} would be sent over Flower's connections, "
            "which are not encrypted; start the SuperLink with --ssl-certfile, --ssl-keyfile and "
            "--ssl-ca-certfile, or, if all clients are on this machine, set split.listen to "
            "127.0.0.1:0 and don't set split.advertise"
        )
