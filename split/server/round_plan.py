"""Limits of what a client trains in a round, from the run's configuration."""

from finetuning.data.batching import steps_per_round
from finetuning.settings import TrainSettings
from split.protocol.training import RoundLimits, RoundPlan
from split.settings import SplitSettings


def largest_plan(
    examples: int, train: TrainSettings, rounds: int, round_number: int, seed: int
) -> RoundPlan:
    """Return the largest plan that a client may join a round with.

    Args:
        examples: Number of examples that the client has reported.
        train: Batch sizes, epochs or local steps.
        rounds: Number of rounds of the run.
        round_number: Number of the round, from 1.
        seed: Seed of the client's training in the round.

    """
    steps = steps_per_round(examples, train)
    return RoundPlan(
        steps=steps, first_step=(round_number - 1) * steps, total_steps=rounds * steps, seed=seed
    )


def round_limits(
    split: SplitSettings, train: TrainSettings, lanes: int, columns_before: int
) -> RoundLimits:
    """Return the limits that all clients of a round share.

    A step has at most ``batch_size`` × ``accumulation`` examples, and every micro-batch but the
    last at least ``batch_size``; see ``finetuning.data.batching``.

    Args:
        split: Window and activation budget.
        train: Batch sizes.
        lanes: How many clients share the budget.
        columns_before: Columns that a prefix takes before each row's tokens.

    """
    return RoundLimits(
        window=split.window,
        activation_budget=split.activation_budget,
        lanes=lanes,
        columns_before=columns_before,
        micro_batches=train.accumulation,
        rows=train.batch_size * train.accumulation,
    )
