"""What a client may train in a round, by the run's configuration and its number of examples."""

from dataclasses import dataclass

from finetuning.data.batching import steps_per_round
from finetuning.settings import SplitSettings, TrainSettings
from split.server.session import ProtocolError


@dataclass(frozen=True)
class RoundPlan:
    """A client's round of training.

    Attributes:
        steps: optimizer steps in the round.
        first_step: optimizer steps of the client's earlier rounds.
        total_steps: optimizer steps of all rounds of the run.
        seed: of the client's training in the round.
        wants_gradient: whether the client's head has anything to train.

    """

    steps: int
    first_step: int
    total_steps: int
    seed: int
    wants_gradient: bool = True


def largest_plan(
    examples: int, train: TrainSettings, rounds: int, round_number: int, seed: int
) -> RoundPlan:
    """Return the largest plan that a client may join a round with.

    Args:
        examples: the number that the client has reported.
        train: batch sizes, epochs or local steps.
        rounds: of the whole run.
        round_number: counted from 1.
        seed: of the client's training in the round.

    """
    steps = steps_per_round(examples, train)
    return RoundPlan(
        steps=steps, first_step=(round_number - 1) * steps, total_steps=rounds * steps, seed=seed
    )


def check_plan(plan: RoundPlan, largest: RoundPlan) -> None:
    """Check what a client joins with.

    Raises:
        ProtocolError: a number is larger than the client's number of examples implies.

    """
    for name in ("steps", "first_step", "total_steps"):
        value, most = getattr(plan, name), getattr(largest, name)
        if value > most:
            raise ProtocolError(
                f"{name} = {value}, and the client's number of examples allows {most}"
            )
    if plan.first_step + plan.steps > plan.total_steps:
        raise ProtocolError(
            f"{plan.steps} steps from step {plan.first_step} are more than total_steps = "
            f"{plan.total_steps}"
        )


@dataclass(frozen=True)
class RoundLimits:
    """Limits that all clients of a round share.

    Attributes:
        window: micro-batches of a client that may be under way at once.
        activation_budget: padded tokens whose activations may exist at once.
        lanes: how many clients share that budget.
        columns_before: columns that a prefix takes before each row's tokens.
        micro_batches: of a client's step.
        rows: of all micro-batches of a client's step.

    """

    window: int
    activation_budget: int
    lanes: int
    columns_before: int
    micro_batches: int
    rows: int

    @classmethod
    def of(
        cls, split: SplitSettings, train: TrainSettings, lanes: int, columns_before: int
    ) -> "RoundLimits":
        """Return the limits that a run's configuration implies.

        A step has at most ``batch_size`` × ``accumulation`` examples, and every micro-batch but the
        last at least ``batch_size``; see ``finetuning.data.batching``.
        """
        return cls(
            window=split.window,
            activation_budget=split.activation_budget,
            lanes=lanes,
            columns_before=columns_before,
            micro_batches=train.accumulation,
            rows=train.batch_size * train.accumulation,
        )

    def credits(self, longest: int) -> int:
        """Return how many micro-batches of a client may be under way at once.

        Args:
            longest: padded tokens of its largest micro-batch, prefixes included.

        Raises:
            ProtocolError: not even one micro-batch fits into the budget.

        """
        if longest > self.activation_budget:
            raise ProtocolError(
                f"a micro-batch of {longest} padded tokens is larger than split.activation-budget "
                f"= {self.activation_budget}; raise that, or lower train.batch-size, "
                "data.max-length or adapter.prefix-length"
            )
        return max(1, min(self.window, self.activation_budget // (self.lanes * max(1, longest))))
