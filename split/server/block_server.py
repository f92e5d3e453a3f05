"""The block server, which runs the body for clients that train and evaluate models."""

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

from finetuning.adapters.adapter import State
from finetuning.data.batching import steps_per_round
from finetuning.settings import AdapterSettings, TrainSettings
from split.lane.lane import Lane
from split.model.partition import PartyName
from split.protocol.frames import Limits, average_bytes
from split.protocol.tickets import Identity, Invitation
from split.protocol.training import RoundLimits, RoundPlan
from split.server.body_adapters import BodyAdapters
from split.server.endpoint import Endpoint, end_lane_on_error
from split.server.evaluation_session import EvaluationSession, Models
from split.server.interfaces import Body, RoundStart, Schedule
from split.server.schedules.client_batch import ClientBatch
from split.server.schedules.hierarchical import Hierarchical
from split.server.schedules.serial import Serial
from split.server.session import Account
from split.server.training_session import TrainingSession
from split.settings import SplitSettings

# What an invitation permits (to train or to evaluate models), and its lifetime in seconds.
Grant = tuple[RoundPlan | Models, float]

# Time limit for lanes to end. A lane can end only after its current job.
_END_SECONDS = 600.0


class BlockServer(Endpoint):
    """Server of the body for a whole run, a context manager that stops it on exit.

    Call its methods from one thread only. Raise ``OSError`` if ``split.listen`` can't be used.

    Args:
        body: The body; see `load_body`. It is closed when the server stops.
        state: Initial adapters of the whole model, by party.
        split: Partition, schedule, limits and addresses.
        adapter: Kind, rank, scale, dropout and targets, or prefix length.
        train: Settings of the optimizers.
        max_batch_tokens: Padded tokens of any client's largest micro-batch, prefixes included.
        max_columns: Number of tokens of the longest row that a client may train on or evaluate.
        run: Name of the run in handshakes.
        rounds: Number of rounds of the run.
        minimum: Minimum number of clients of a round, if clients train together.
        max_cached_tokens: Padded tokens, part of the budget, of the largest batch of texts.

    Example:
        >>> import split
        >>> from finetuning.adapters.adapter import initial_adapter
        >>> from finetuning.model.base_model import locate
        >>> from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
        >>> model, adapter, settings = ModelSettings(), AdapterSettings(), split.SplitSettings()
        >>> directory = locate(model.name)
        >>> state, _ = initial_adapter(model.name, adapter, seed=0)
        >>> server = split.BlockServer(
        ...     body=split.load_body(directory, model, settings),
        ...     state=split.take_apart(state, split.partition_of(directory, settings)),
        ...     split=settings,
        ...     adapter=adapter,
        ...     train=TrainSettings(local_steps=1),
        ...     max_batch_tokens=64,
        ...     max_columns=32,
        ... )
        >>> server.begin_round({"court": 2}, seed=0)
        >>> invitation = server.invite_to_train("court", round_number=1, seed=0, lifetime=60.0)
        >>> server.stop()  # when the client has trained, as in the example of `SplitModel`
    """

    def __init__(
        self,
        body: Body,
        state: Mapping[PartyName, State],
        split: SplitSettings,
        adapter: AdapterSettings,
        train: TrainSettings,
        max_batch_tokens: int,
        max_columns: int,
        run: str = "split",
        rounds: int = 1,
        minimum: int = 1,
        max_cached_tokens: int = 0,
    ) -> None:
        self._train = train
        self._run = run
        self._rounds = rounds
        self._max_batch_tokens = max_batch_tokens
        self._max_cached_tokens = max_cached_tokens
        self._grants: dict[Identity, Grant] = {}
        self._accounts: list[Account] = []
        self._open: set[TrainingSession | EvaluationSession] = set()
        self._changed = threading.Condition()
        self._examples: dict[str, int] = {}
        client = sum(t.numel() for party in ("head", "tail") for t in state[party].values())
        limits = Limits(
            hidden=body.hidden_size,
            wire_dtype=split.wire_dtype,
            max_tokens=max_batch_tokens,
            average_bytes=average_bytes(client) if split.average_every else 0,
            window=split.window,
            max_columns=max_columns,
        )
        super().__init__(body, adapter, split, limits)
        make_adapters = partial(BodyAdapters, body, adapter, train, state["body"])
        self.schedule = self._make_schedule(make_adapters, state, minimum)
        self._lanes.start()

    def _make_schedule(
        self,
        make_adapters: Callable[[], BodyAdapters],
        state: Mapping[PartyName, State],
        minimum: int,
    ) -> Schedule:
        split, compute = self._split, self.compute
        if split.schedule == "serial":
            return Serial(make_adapters())
        if split.schedule == "client-batch":
            return ClientBatch(
                adapters=make_adapters(), compute=compute, split=split, minimum=minimum
            )
        return Hierarchical(
            make_adapters=make_adapters, compute=compute, state=state, split=split, minimum=minimum
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def begin_round(
        self,
        examples: Mapping[str, int],
        seed: int,
        own: State | None = None,
        caps: Mapping[str, float] | None = None,
    ) -> None:
        """Prepare for a round of training.

        ``examples`` maps each client that will be invited to its number of training examples, which
        is its weight in averages. ``seed`` seeds the round's dropout in the body; only
        ``client-batch`` uses it. ``own`` contains the adapters of the head and tail that clients
        begin with, with which averaging compares the clients' adapters. None means that nothing is
        averaged within the round. ``caps`` are the clients' caps on distances; see
        ``robust_aggregation.update_factors``.
        """
        self._examples = dict(examples)
        start = RoundStart(
            weights=self._examples,
            keeps_optimizers=self._train.optimizer_state == "keep",
            seed=seed,
            client_adapters=own,
            caps=dict(caps or {}),
        )
        self.compute.call(lambda: self.schedule.begin_round(start))

    def invite_to_train(
        self,
        client: str,
        round_number: int,
        seed: int,
        lifetime: float,
        examples: int | None = None,
    ) -> Invitation:
        """Invite a client to train for a round; rounds are numbered from 1.

        ``seed`` seeds the client's training in this round. The ticket is valid for ``lifetime``
        seconds. The number of training examples limits the number of steps; None means the number
        that was passed to ``begin_round``.
        """
        if examples is None:
            examples = self._examples[client]
        steps = steps_per_round(examples, self._train)
        plan = RoundPlan(
            steps=steps,
            first_step=(round_number - 1) * steps,
            total_steps=self._rounds * steps,
            seed=seed,
        )
        identity = Identity(f"{self._run}/train", round_number, client)
        self._grants[identity] = plan, lifetime
        return self._invite(identity, lifetime)

    def invite_to_evaluate(
        self, client: str, round_number: int, models: Models, lifetime: float
    ) -> Invitation:
        """Invite a client to evaluate models.

        ``round_number`` is the number of the last round before this evaluation, and 0 before the
        first round. The ticket is valid for ``lifetime`` seconds.
        """
        identity = Identity(f"{self._run}/evaluate", round_number, client)
        self._grants[identity] = models, lifetime
        return self._invite(identity, lifetime)

    def mark_absent(self, client: str) -> None:
        """Stop waiting for a client that will not start the round."""
        self.schedule.mark_absent(client)

    def progress(self) -> list[tuple[str, int, int, int]]:
        """Return (client, finished steps, planned steps, padded tokens) of each training lane."""
        with self._changed:
            training = [each for each in self._open if isinstance(each, TrainingSession)]
        return sorted(
            (each.account.client, each.account.steps, each.planned_steps, each.account.tokens)
            for each in training
        )

    def finish_lanes(self, timeout_seconds: float = _END_SECONDS) -> list[Account]:
        """End all lanes and invitations; return the lanes' accounts since the last call."""
        with self._changed:
            self._grants.clear()
            for session in self._open:
                session.lane.close("this phase of the round is over (round-timeout)")
            if not self._changed.wait_for(lambda: not self._open, timeout_seconds):
                names = sorted(session.account.client for session in self._open)
                raise RuntimeError(f"lanes did not end within {timeout_seconds:g} s: {names}")
            accounts, self._accounts = self._accounts, []
        return sorted(accounts, key=lambda account: account.client)

    def state_of(self, client: str) -> State:
        """Return the body adapters of a client.

        Call this after the client's lane has closed and before ``end_round``.
        """
        return self.compute.call(lambda: self.schedule.state_of(client))

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the body adapters that the next round begins with.

        If each client has its own adapters, average them, weighted by ``weights`` (not empty).
        """
        return self.compute.call(lambda: self.schedule.end_round(weights))

    @property
    def scaled(self) -> dict[str, float]:
        """The smallest scaling factor of each client that was scaled down in the round."""
        return self.schedule.scaled

    def export_optimizers(self) -> State:
        """Return all optimizer states, keyed by ``<client or body>/<weight>:<moment>``.

        The result is empty if every round begins with new optimizers.
        """
        if self._train.optimizer_state != "keep":
            return {}
        states = self.compute.call(self.schedule.export_optimizers)
        return {f"{key}/{n}": value for key, state in states.items() for n, value in state.items()}

    def load_optimizers(self, states: State) -> None:
        """Restore the states that ``export_optimizers`` returned."""
        by_key: dict[str, State] = {}
        for name, value in states.items():
            key, _, rest = name.partition("/")
            by_key.setdefault(key, {})[rest] = value
        self.compute.call(lambda: self.schedule.load_optimizers(by_key))

    def rotate_keys(self) -> None:
        """Generate a new server key. Invitations with the old key become invalid."""
        self._keys.rotate()

    def stop(self, timeout_seconds: float = _END_SECONDS) -> None:
        """End all lanes and threads, then raise a RuntimeError if a lane did not end in time."""
        try:
            self.finish_lanes(timeout_seconds)
        finally:
            super().stop()

    def _serve(self, lane: Lane) -> None:
        with self._changed:
            grant = self._grants.pop(lane.identity, None)
            if grant is None:
                lane.close("this phase of the round is over (round-timeout)")
                return
            session = self._session(lane, grant)
            self._open.add(session)
        started = time.monotonic()
        with end_lane_on_error(session):
            session.serve()
        session.count_traffic()
        session.account.seconds = time.monotonic() - started
        with self._changed:
            self._accounts.append(session.account)
            self._open.discard(session)
            self._changed.notify_all()

    def _session(self, lane: Lane, grant: Grant) -> TrainingSession | EvaluationSession:
        allowed, lifetime = grant
        if isinstance(allowed, RoundPlan):
            # Only the last micro-batch of a step can have fewer than ``batch_size`` examples.
            limits = RoundLimits(
                window=self._split.window,
                activation_budget=self._split.activation_budget,
                lanes=1 if self._split.schedule == "serial" else len(self._examples),
                columns_before=self._adapter.columns_before,
                micro_batches=self._train.accumulation,
                rows=self._train.batch_size * self._train.accumulation,
            )
            return TrainingSession(
                lane=lane,
                max_plan=allowed,
                schedule=self.schedule,
                compute=self.compute,
                limits=limits,
                split=self._split,
                lifetime=lifetime,
            )
        return EvaluationSession(
            lane=lane,
            models=allowed,
            generation=self._generation,
            split=self._split,
            max_batch_tokens=self._max_batch_tokens,
            max_cached_tokens=min(self._max_cached_tokens, self._split.activation_budget),
            lifetime=lifetime,
        )
