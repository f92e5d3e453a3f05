"""The rounds of all strategies: register, train, average by data size, evaluate, checkpoint."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, aggregate_metricrecords

from finetuning.model.base_model import locate
from strategies.journal import Journal, Progress
from strategies.messages import (
    ARRAYS,
    CONFIG,
    METRICS,
    SIZE,
    Instruction,
    State,
    from_arrays,
    metrics_of,
)
from strategies.participants import Participants, TooFewClientsError, exchange
from strategies.run_config import RunConfig


class Rounds(Strategy):
    """In each round clients train adapters, and the server averages them by data size.

    Args:
        config: The run's configuration.
        fingerprint: Fingerprint of the base model, as the server computed it.
        progress: Progress of the run, from which it continues.
        journal: Records the run.

    """

    def __init__(
        self, config: RunConfig, fingerprint: dict[str, str], progress: Progress, journal: Journal
    ) -> None:
        self.config = config
        self.progress = progress
        self._journal = journal
        self._instruction = Instruction(
            round=0, lineage=progress.lineage, base="", time_limit=config.round_timeout
        )
        self._participants = Participants(config, self._instruction, fingerprint)
        self._reference = ArrayRecord()
        self._round_started = 0.0

    def summary(self) -> None:
        """Do nothing: the run's folder has its configuration."""

    @staticmethod
    def locate_base_model(config: RunConfig) -> Path:
        """Return the directory of the server's part of the base model.

        Raises:
            BaseModelError: The base model can't be found.

        """
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
        includes the finished ones. Flower's configs are not used, nor is ``evaluate_fn``: messages
        follow from the run config, and the server has no data.

        Raises:
            RefusedError: Clients can't take part as they are.
            TooFewClientsError: Fewer than ``min-nodes`` are connected or sent valid replies.

        """
        with self._prepared(grid, initial_arrays) as arrays:
            return self._run(grid=grid, arrays=arrays, num_rounds=num_rounds, timeout=timeout)

    @contextmanager
    def _prepared(self, grid: Grid, arrays: ArrayRecord) -> Iterator[ArrayRecord]:
        """Hold resources of the strategy during a run; yield the clients' part of the adapter."""
        yield arrays

    def _run(self, grid: Grid, arrays: ArrayRecord, num_rounds: int, timeout: float) -> Result:
        self._participants.register_all(grid)
        self._instruction = replace(self._instruction, base=self._participants.base)
        self._reference = arrays
        result = Result(arrays=arrays)
        finished = self.progress.finished_rounds
        lacks_importance = self._evaluation(finished).importance and not self.progress.importance
        if not self.progress.evaluated or lacks_importance:
            self._evaluate(
                round_number=finished, arrays=arrays, grid=grid, timeout=timeout, result=result
            )
        for current in range(finished + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %d/%d]", current, num_rounds)
            messages = self.configure_train(current, arrays, ConfigRecord(), grid)
            replies = self._exchange(messages, grid, timeout)
            aggregated, metrics = self.aggregate_train(current, replies)
            assert aggregated is not None and metrics is not None  # aggregate_train raises
            result.arrays = arrays = aggregated
            result.train_metrics_clientapp[current] = metrics
            self.progress = replace(
                self.progress, finished_rounds=current, evaluated=False, importance=None
            )
            self._checkpoint(arrays)
            self._evaluate(
                round_number=current, arrays=arrays, grid=grid, timeout=timeout, result=result
            )
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make a train message with the global adapter to every connected client."""
        self._participants.register_newcomers(grid)
        self._round_started = time.monotonic()
        instruction = replace(self._instruction, round=server_round)
        content = RecordDict({ARRAYS: arrays, CONFIG: instruction.to_record()})
        return self._participants.address(MessageType.TRAIN, content, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the valid replies' adapters by data size (Eq. 2).

        Raises:
            TooFewClientsError: There are fewer valid replies than ``min-nodes``.

        """
        valid, left_out = self._participants.screen(replies, self._reference)
        seconds = round(time.monotonic() - self._round_started, 3)
        self._journal.record(
            {
                "event": "round",
                "round": server_round,
                "participants": list(valid),
                "left_out": _reasons(left_out),
                "seconds": seconds,
            }
        )
        if len(valid) < self.config.min_nodes:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in left_out.items())
            raise TooFewClientsError(
                f"round {server_round}: {len(valid)} valid replies, and min-nodes = "
                f"{self.config.min_nodes} are needed; left out:{reasons or ' nobody'}"
            )
        sizes = self._participants.asked
        for name, reply in valid.items():
            metrics = {underscored(k): v for k, v in metrics_of(reply).items() if k != SIZE}
            event = {"event": "train", "round": server_round, "client": name}
            self._journal.record({**metrics, **event, "examples": sizes[name]})
            adapter = self._personalised(name, from_arrays(reply.content.array_records[ARRAYS]))
            self._journal.keep_personalised(
                client=name, state=adapter, round_number=server_round, size=sizes[name]
            )
        self._average({name: sizes[name] for name in valid})
        log(INFO, "Averaged the adapters of %s", ", ".join(valid))
        contents = [reply.content for reply in valid.values()]
        return aggregate_arrayrecords(contents, SIZE), _averages(contents)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Make an evaluate message to every connected client, if one is due after this round."""
        instruction = self._evaluation(server_round)
        if not (instruction.losses or instruction.importance or instruction.final):
            return []
        content = RecordDict({ARRAYS: arrays, CONFIG: instruction.to_record()})
        return self._participants.address(MessageType.EVALUATE, content, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Record each client's metrics; return their averages by data size."""
        expected = self._reference if self._evaluation(server_round).importance else None
        # A negative J would push weights away from the global ones.
        valid, left_out = self._participants.screen(replies, expected, minimum=0.0)
        if left_out:
            missing = {"event": "evaluation-missing", "round": server_round}
            self._journal.record({**missing, "left_out": _reasons(left_out)})
        for name, reply in valid.items():
            for event in _evaluation_events(metrics_of(reply)):
                self._journal.record(
                    {**event, "event": "evaluate", "round": server_round, "client": name}
                )
        self._use_importance({name: reply.content for name, reply in valid.items()})
        return _averages([reply.content for reply in valid.values()]) if valid else None

    def _evaluation(self, server_round: int) -> Instruction:
        """Return the evaluation that is due after a round."""
        final = server_round == self.config.rounds
        return replace(
            self._instruction,
            round=server_round,
            losses=final or server_round % self.config.evaluate.every == 0,
            final=final,
        )

    def _exchange(self, messages: Iterable[Message], grid: Grid, timeout: float) -> list[Message]:
        """Send messages and wait for replies; all clients work at the same time."""
        return exchange(grid, messages, timeout)

    def _whole(self, averaged: State) -> State:
        """Return the global adapter from the average of the clients' adapters."""
        return averaged

    def _personalised(self, client: str, local: State) -> State:
        """Return the adapter of the whole model from the part that a client sent."""
        return local

    def _average(self, weights: Mapping[str, int]) -> None:
        """Average the server's part of the clients' adapters; by default it has none."""

    def _use_importance(self, contents: dict[str, RecordDict]) -> None:
        """Use the importance J from evaluate replies; only FedJudge-CL requests it."""

    def _evaluate(
        self, round_number: int, arrays: ArrayRecord, grid: Grid, timeout: float, result: Result
    ) -> None:
        messages = list(self.configure_evaluate(round_number, arrays, ConfigRecord(), grid))
        if messages:
            replies = exchange(grid, messages, timeout)
            metrics = self.aggregate_evaluate(round_number, replies)
            if metrics is not None:
                result.evaluate_metrics_clientapp[round_number] = metrics
        self.progress = replace(self.progress, evaluated=True)
        self._checkpoint(arrays)

    def _checkpoint(self, arrays: ArrayRecord) -> None:
        self._journal.checkpoint(self.progress, self._whole(from_arrays(arrays)))


def _reasons(left_out: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"client": name, "reason": reason} for name, reason in left_out.items()]


def _averages(contents: list[RecordDict]) -> MetricRecord:
    """Average by data size the metrics that all replies have."""
    records = [content.metric_records[METRICS] for content in contents]
    shared = set.intersection(*(set(record) for record in records))
    return aggregate_metricrecords(
        [RecordDict({METRICS: MetricRecord({k: r[k] for k in sorted(shared)})}) for r in records],
        SIZE,
    )


def _evaluation_events(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split metrics like ``global.loss`` into one event for each evaluated model."""
    events = []
    for model in ("base", "global", "personalised"):
        prefix = f"{model}."
        own = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if own:
            events.append({**{underscored(k): v for k, v in own.items()}, "model": model})
    return events


def underscored(key: str) -> str:
    """Return a key as it is spelled in ``metrics.jsonl``."""
    return key.replace("-", "_")
