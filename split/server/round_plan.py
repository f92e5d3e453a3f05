"""Limits on the training of a client in a round, from the run's configuration."""

from finetuning.data.batching import steps_per_round
from finetuning.settings import TrainSettings
from split.protocol.training import RoundLimits, RoundPlan
from split.settings import SplitSettings


def largest_plan(
    examples: int, train: TrainSettings, rounds: int, round_number: int, seed: int
) -> RoundPlan:
    """Return the largest plan with which a client may join a round.

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
    """Return the limits that apply to every client of a round.

    A step has at most ``batch_size`` × ``accumulation`` examples. Every micro-batch except the last
    has at least ``batch_size`` examples; see ``finetuning.data.batching``.

    Args:
        split: Window and activation budget.
        train: Batch sizes.
        lanes: Number of clients that share the activation budget.
        columns_before: Number of prefix positions before the tokens of each row.

    """
    return RoundLimits(
        window=split.window,
        activation_budget=split.activation_budget,
        lanes=lanes,
        columns_before=columns_before,
        micro_batches=train.accumulation,
        rows=train.batch_size * train.accumulation,
    )
