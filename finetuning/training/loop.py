"""One round of local training: a plain loop over optimizer steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from finetuning.adapters.adapter import State, load_state
from finetuning.data.batching import collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.errors import DeadlineError
from finetuning.model.interface import TrainableModel
from finetuning.progress import progress_bar
from finetuning.randomness import derive_seed
from finetuning.settings import TrainSettings
from finetuning.training.optimization import (
    OptimizerState,
    export_optimizer,
    learning_rate,
    load_optimizer,
    make_optimizer,
)
from finetuning.training.penalty import Penalty


@dataclass(frozen=True)
class LocalRound:
    """A client's training in a round, and the round's position within the run."""

    steps: Sequence[Sequence[int]]  # indices of the examples of each optimizer step
    first_step: int  # number of steps in this client's earlier rounds, including rounds it missed
    total_steps: int  # number of steps in all rounds of the run
    seed: int  # seed of this client in this round
    deadline: float  # time of the deadline on ``time.monotonic``'s clock


@dataclass
class TrainingReport:
    """Result of a round of local training, or of its steps so far."""

    # Each step's mean loss per target token in nats, before the step's update.
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # each step's gradient norm before clipping
    # Each step's share of the penalty in the gradient norm; empty without a penalty.
    shares: list[float] = field(default_factory=list)
    tokens: int = 0  # number of tokens processed, without padding
    target_tokens: int = 0  # number of tokens predicted
    seconds: float = 0.0  # wall-clock time of the steps
    learning_rate: float = 0.0  # learning rate of the last step

    @property
    def gradient_norm(self) -> float:
        """Norm of the gradient before clipping, as a mean over steps."""
        return sum(self.norms) / len(self.norms)

    @property
    def penalty_gradient_share(self) -> float | None:
        """Penalty's share of the gradient norm, as a mean over steps; None without a penalty.

        The mean excludes the first step, where the penalty's gradient is 0.
        """
        return sum(self.shares) / max(len(self.shares) - 1, 1) if self.shares else None


class RoundCheckpoint(Protocol):
    """Storage of an unfinished round."""

    def load(self) -> tuple[TrainingReport, State, OptimizerState] | None:
        """Return the report, adapter and optimizer state to continue from, or None."""

    def save_if_due(
        self,
        report: TrainingReport,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Store the state after a step, if enough time has passed since the last time."""


def train_round(
    model: TrainableModel,
    parameters: Mapping[str, torch.nn.Parameter],
    examples: Sequence[Example],
    padding: int,
    local_round: LocalRound,
    settings: TrainSettings,
    penalty: Penalty | None = None,
    optimizer_state: OptimizerState | None = None,
    description: str = "training",
    checkpoint: RoundCheckpoint | None = None,
) -> tuple[TrainingReport, OptimizerState]:
    """Train the adapter for one round.

    The model computes gradients. ``parameters``, the adapter's weights by name, are changed in
    place. The penalty, if any, is added to the loss. Training continues from the optimizer's state;
    None means a new optimizer. If ``checkpoint`` contains a part of the round, the round continues
    from there. Return the report, and the optimizer's state after the last step.

    Raise ``DeadlineError`` if the deadline passed; the adapter contains the updates of the finished
    steps. Raise ``FloatingPointError`` if a loss is not finite.
    """
    report = TrainingReport()
    if checkpoint is not None and (unfinished := checkpoint.load()):
        report, adapter, optimizer_state = unfinished
        load_state(parameters, adapter)
    optimizer = make_optimizer(parameters, settings)
    load_optimizer(optimizer, parameters, optimizer_state or {})
    # An interrupted round of another client in this process may have left gradients behind.
    optimizer.zero_grad()
    rate = learning_rate(settings, local_round.total_steps)
    lengths = [len(example.tokens) for example in examples]
    columns = [model.columns_before + length for length in lengths]
    budget = settings.batch_size * max(columns)
    started = time.perf_counter() - report.seconds
    with progress_bar(total=len(local_round.steps), description=description) as bar:
        bar.update(len(report.losses))
        for index in range(len(report.losses), len(local_round.steps)):
            step = local_round.steps[index]
            if time.monotonic() > local_round.deadline:
                raise DeadlineError(
                    f"{index} of {len(local_round.steps)} steps were done when the round's time "
                    "limit expired; raise round-timeout, or train fewer steps (train.local-steps)"
                )
            batches = [
                collate([examples[i] for i in group], padding)
                for group in micro_batches(step, columns, budget)
            ]
            step_targets = sum(len(batch.labels) for batch in batches)
            summed = sum(model.accumulate(batches, derive_seed(local_round.seed, index)))
            # A step of private training may have no rows; its update is then only noise.
            loss = summed / max(step_targets, 1)
            if not loss < float("inf"):
                raise FloatingPointError(f"the loss of step {index + 1} is {loss}")
            if penalty is not None:
                report.shares.append(penalty.add_gradient())
            report.norms.append(model.clip(settings.max_gradient_norm))
            report.learning_rate = rate(local_round.first_step + index)
            optimizer.param_groups[0]["lr"] = report.learning_rate
            optimizer.step()
            optimizer.zero_grad()
            report.losses.append(loss)
            report.tokens += sum(lengths[i] for i in step)
            report.target_tokens += step_targets
            report.seconds = time.perf_counter() - started
            if checkpoint is not None and index + 1 < len(local_round.steps):
                checkpoint.save_if_due(report, parameters, optimizer)
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    return report, export_optimizer(optimizer, parameters)
