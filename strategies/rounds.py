"""The rounds of all strategies: register, train, average by data size, evaluate, checkpoint."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from logging import INFO
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from federation.authentication import Signer
from federation.messages import Instruction, from_arrays, to_arrays
from federation.run_config import RunConfig
from federation.run_folder import LaneStatus, RunStatus
from finetuning.adapters.adapter import State
from finetuning.aggregation.mixed_ranks import complete, pad
from finetuning.model.fingerprint import combine_digests
from finetuning.model.locating import locate
from strategies.averaging import Averaging
from strategies.journal import Journal, Progress, reasons
from strategies.masked_sums import GroupMeans, record_group_metrics
from strategies.participants import Participants
from strategies.phases import Phases
from strategies.registration import Registration
from strategies.replies import Replies


class Rounds(Strategy):
    """Base class of the strategies: clients train adapters that the server averages by data size.

    The run continues from ``progress``. ``fingerprint`` is the base model's fingerprint as computed
    by the server. Without a ``signer``, instructions aren't signed. ``agreed`` contains the agreed
    numbers of rows by name; None, as in a simulation, believes all clients' data sizes.

    With ``values`` as the run config, ``grid`` connected to the clients, and a `Journal`:

    >>> from federation.run_config import parse_run_config
    >>> from finetuning.adapters.adapter import initial_adapter
    >>> from finetuning.model.fingerprint import fingerprint
    >>> from strategies.fedjudge import FedJudgeBase
    >>> config = parse_run_config(values)
    >>> base = FedJudgeBase.locate_base_model(config)
    >>> adapter, _ = initial_adapter(config.model.name, config.adapter, seed=0)
    >>> strategy = FedJudgeBase(config, fingerprint(base), Progress("example"), journal)
    >>> result = strategy.start(grid, to_arrays(adapter), config.rounds)
    >>> strategy.progress.finished_rounds
    1
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
        self.config = config
        self.progress = progress
        self._journal = journal
        self._instruction = Instruction(
            round=0,
            lineage=progress.lineage,
            base="",
            time_limit=config.round_timeout,
            targets=config.adapter.targets,
        )
        queried = replace(self._instruction, round=progress.finished_rounds)
        self._registration = Registration(config, queried, fingerprint, signer, agreed)
        self._participants = Participants(config, self._registration)
        self._phases = Phases(config, self._participants, journal, signer)
        self._averaging = Averaging(config, self._registration.agreed, journal)
        self._update_state: State = {}  # from before the round, as the reference is
        self._reference = ArrayRecord()
        self._sizes: dict[str, int] = {}  # of the averaged clients

    def summary(self) -> None:
        """Do nothing, because the run's folder contains the configuration."""

    @staticmethod
    def locate_base_model(config: RunConfig) -> Path:
        """Return the directory of the base model; raise ``BaseModelError`` if it is missing."""
        return locate(config.model.name)

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
        """Run the remaining rounds.

        ``initial_arrays`` is the global adapter after ``progress.finished_rounds``; ``num_rounds``
        includes the finished rounds. ``train_config``, ``evaluate_config`` and ``evaluate_fn`` are
        not used: the run config determines all messages, and the server has no data. Raise
        ``RefusedError`` if at least one client can't take part, ``TooFewClientsError`` if there are
        fewer clients or valid replies than ``min-nodes``, or ``NotFiniteError`` if most clients
        report that the global adapter is unusable.
        """
        with self._prepared(grid, initial_arrays) as prepared:
            arrays = self._reference = prepared
            self._phases.status.begin(RunStatus(round=self.progress.finished_rounds))
            self._participants.register_all(grid)
            self._instruction = replace(
                self._instruction, base=combine_digests(self._registration.fingerprint)
            )
            finished = self.progress.finished_rounds
            wants_importance = self._evaluation(finished).importance
            if not self.progress.evaluated or (wants_importance and not self.progress.importance):
                self._evaluate(arrays, grid, timeout)
            for current in range(finished + 1, num_rounds + 1):
                log(INFO, "")
                log(INFO, "[ROUND %d/%d]", current, num_rounds)
                messages = self.configure_train(current, arrays, ConfigRecord(), grid)
                replies = self._exchange(messages, grid, timeout, training=True)
                arrays, _ = self.aggregate_train(current, replies)
                self.progress = replace(
                    self.progress, finished_rounds=current, evaluated=False, importance=None
                )
                self._checkpoint(arrays)
                arrays = self._evaluate(arrays, grid, timeout)
            return Result(arrays=arrays)

    @contextmanager
    def _prepared(self, grid: Grid, arrays: ArrayRecord) -> Iterator[ArrayRecord]:
        """Acquire the strategy's resources for a run; yield the clients' part of the adapter."""
        yield arrays

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Create a train message with the global adapter for every client of the round."""
        self._reference, self._update_state = arrays, self.progress.update or {}
        refused = self._participants.register_newcomers(grid, server_round - 1)
        if refused:
            event = {"event": "refused", "round": server_round}
            self._journal.record({**event, "left_out": reasons(refused)})
        limit = self.config.train_timeout
        instruction = replace(self._instruction, round=server_round, time_limit=limit)
        return self._phases.begin("training", instruction, arrays, grid, draw=server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """Check replies, and return the next global adapter (see `Averaging`).

        Raise ``TooFewClientsError`` if there are fewer valid replies than ``min-nodes``, or
        ``NotFiniteError`` if most clients report that the global adapter is unusable.
        """
        with Replies(self._journal.scratch) as collected:
            trained = self._trained(server_round)
            self._phases.collect(collected, replies, self._instruction.base, trained)
            means = self._phases.open_sums(collected, from_arrays(trained))
            self._phases.leave_out(collected, self._unfinished(list(collected.metrics)))
            event = {"event": "round", "round": server_round}
            event |= {"seconds": self._phases.status.seconds, "participants": [*collected.metrics]}
            self._journal.record({**event, "left_out": reasons(collected.left_out)})
            if not self._evaluation(server_round - 1).losses:  # the evaluation checked this, if any
                collected.require_finite(self._journal, server_round - 1, self._participants.asked)
            collected.require_enough(f"round {server_round}", self.config.min_nodes)
            collected.record_training(self._journal, server_round)
            self._sizes = {}
            return self._average(server_round, collected, means), None

    def _average(
        self, server_round: int, new: Replies, means: GroupMeans | None = None
    ) -> ArrayRecord:
        """Average the adapters of new replies and of the round's earlier replies, if any.

        With masked sums, average the means of groups.
        """
        reference = from_arrays(self._trained(server_round))
        ranked = bool(self.config.adapter.ranks)

        def state_of(name: str) -> State:
            if means:
                return means.states[name]
            saved = None if name in new.metrics else self._journal.personalised(name)
            state = {key: saved[1][key] for key in reference} if saved else new.state(name)
            return complete(state, reference) if ranked else state

        self._sizes = dict(sorted((self._sizes | new.sizes).items()))
        updated, state = self._averaging.average(
            round_number=server_round,
            sizes=means.sizes if means else self._sizes,
            state_of=state_of,
            reference=reference,
            update_state=self._update_state,
            ranked=new.tensors() if ranked else None,
        )
        if means is None and not ranked and new.sizes == self._sizes:
            self._averaging.record_factor_error(server_round, new.sizes, new.tensors())
        for name in new.metrics:  # from here on, replies' files may be moved
            personalised = None if means else self._personalised(name, new)
            self._journal.keep_personalised(name, personalised, server_round, self._sizes[name])
        self.progress = replace(self.progress, update=self._update_state | state or None)
        self._average_at_server(self._averaging.counted(self._sizes))
        log(INFO, "Averaged the adapters of %s", ", ".join(self._sizes))
        return to_arrays(from_arrays(self._reference) | updated)

    def _trained(self, server_round: int) -> ArrayRecord:
        """Return the part of the round's initial adapter that clients train and send."""
        names = self.config.adapter.trained_names(self._reference, server_round)
        return ArrayRecord({name: self._reference[name] for name in names})

    def _average_again(self, server_round: int) -> ArrayRecord | None:
        """Repeat the average with any late replies, as if they had been in time, or return None."""
        with Replies(self._journal.scratch) as late:
            replies, base = self._phases.late_replies(), self._instruction.base
            self._phases.collect(late, replies, base, self._trained(server_round), are_late=True)
            if not late.metrics:
                return None
            log(INFO, "Late replies are averaged: %s", ", ".join(late.metrics))
            event = {"event": "late", "round": server_round, "clients": list(late.metrics)}
            self._journal.record({**event, "participants": sorted({*self._sizes, *late.metrics})})
            late.record_training(self._journal, server_round)
            return self._average(server_round, late)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Create evaluate messages for the sampled clients, if the round has an evaluation."""
        instruction = self._evaluation(server_round)
        if not instruction.evaluates:
            return []
        return self._phases.begin("evaluation", instruction, arrays, grid, draw=0)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Record each client's metrics, and process the importance J if it was requested.

        Raise ``TooFewClientsError`` if there are fewer valid replies than ``min-nodes`` after the
        last round, or ``NotFiniteError`` if most clients report that the adapter is unusable.
        """
        evaluation = self._evaluation(server_round)
        # J protects what the next round trains.
        expected = self._trained(server_round + 1) if evaluation.importance else None
        with Replies(self._journal.scratch) as collected:
            self._phases.collect(
                collected, replies, evaluation.base, expected, evaluation=evaluation
            )
            means = self._phases.open_sums(collected, None)
            if left_out := dict(sorted((collected.left_out | collected.withheld).items())):
                missing = {"event": "evaluation-missing", "round": server_round}
                self._journal.record({**missing, "left_out": reasons(left_out)})
            collected.require_finite(self._journal, server_round, self._participants.asked)
            collected.record_evaluation(self._journal, server_round)
            if means:
                record_group_metrics(self._journal, server_round, means)
            if server_round >= self.config.rounds:
                # No round follows: the run must fail, so that resuming it repeats this evaluation.
                phase = f"evaluation after round {server_round}"
                collected.require_enough(phase, self.config.min_nodes)
            self._use_importance(means or collected)

    def _evaluation(self, server_round: int) -> Instruction:
        """Return the instruction for the evaluation after a round."""
        # With ``rounds = 0``, there are no trained weights to save.
        final = server_round == self.config.rounds > 0
        return replace(
            self._instruction,
            round=server_round,
            losses=final or server_round % self.config.evaluate.every == 0,
            final=final,
        )

    def _exchange(
        self, messages: Iterable[Message], grid: Grid, timeout: float, training: bool
    ) -> Iterator[Message]:
        """Send train or evaluate messages to all clients at once, and yield replies."""
        size = sum(len(array.data) for array in self._reference.values())
        return self._phases.exchange(messages, grid, timeout, training, size, self._lanes)

    def _lanes(self) -> list[LaneStatus]:
        """Return the progress of clients within a round; empty if the progress is unknown."""
        return []

    def _unfinished(self, replied: Collection[str]) -> dict[str, str]:
        """Return clients that sent a valid reply but didn't finish training, with the reasons."""
        return {}

    def _whole(self, averaged: State) -> State:
        """Return the complete global adapter, given the average of the clients' adapters."""
        return averaged

    def _personalised(self, client: str, replies: Replies) -> State | Path:
        """Return the adapter of a valid reply for the whole model, or a file with it to move."""
        if self.config.adapter.ranks:
            return pad(replies.state(client), self.config.adapter.rank)
        if self.config.adapter.trained == "both":
            return replies.file(client)
        return from_arrays(self._reference) | replies.state(client)

    def _average_at_server(self, weights: Mapping[str, int]) -> None:
        """Average the adapters that are at the server; the default does nothing."""

    def _use_importance(self, replies: Replies | GroupMeans) -> None:
        """Process the importance J from evaluate replies; only FedJudge-CL requests it."""

    def _evaluate(self, arrays: ArrayRecord, grid: Grid, timeout: float) -> ArrayRecord:
        """Evaluate the global adapter; return it, or the average that late replies have changed."""
        round_number = self.progress.finished_rounds
        messages = list(self.configure_evaluate(round_number, arrays, ConfigRecord(), grid))
        if self._evaluation(round_number).evaluates:  # even if no client can be reached
            replies = self._exchange(messages, grid, timeout, training=False)
            self.aggregate_evaluate(round_number, replies)
            seconds = self._phases.status.seconds
            self._journal.record({"event": "evaluation", "round": round_number, "seconds": seconds})
        again = self._average_again(round_number)
        if again is not None:
            self.progress = replace(self.progress, importance=None)  # it was for the other average
            self._checkpoint(again)
            return self._evaluate(again, grid, timeout)
        self.progress = replace(self.progress, evaluated=True)
        self._checkpoint(arrays)
        return arrays

    def _checkpoint(self, arrays: ArrayRecord) -> None:
        self._journal.checkpoint(self.progress, self._whole(from_arrays(arrays)))
