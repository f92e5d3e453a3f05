"""The counts that a client sends with the micro-batches of a step, checked against its limits."""

from split.server.head_output import HeadOutput
from split.server.round_plan import RoundLimits
from split.server.session import ProtocolError


class StepCounts:
    """Checks one step after another.

    Args:
        limits: of the round.
        longest: padded tokens of the client's largest micro-batch, prefixes included.

    """

    def __init__(self, limits: RoundLimits, longest: int) -> None:
        self._limits = limits
        self._longest = longest
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._announced = (0, 0)  # targets and micro-batches of the step
        self._added = self._rows = self._targets = 0

    @property
    def complete(self) -> bool:
        """Whether all micro-batches of the step have been added."""
        return self._added > 0 and self._added == self._announced[1]

    def add(self, output: HeadOutput) -> None:
        """Count the next micro-batch of the step.

        Raises:
            ProtocolError: a count is beyond its limit, or contradicts another one.

        """
        limits, index = self._limits, output.index
        announced = (output.step_targets, output.micro_batches)
        size = output.budget_tokens
        if size > self._longest:
            raise ProtocolError(f"{size} padded tokens came; {self._longest} were agreed")
        if index >= output.micro_batches or not output.targets:
            raise ProtocolError(f"micro-batch {index} has more than its step of {announced}")
        if index and announced != self._announced:
            raise ProtocolError(f"a step of {self._announced} became one of {announced}")
        if output.micro_batches > limits.micro_batches:
            raise ProtocolError(
                f"a step of {output.micro_batches} micro-batches came; train.accumulation allows "
                f"{limits.micro_batches}"
            )
        tokens = int(output.padding.lengths.sum())
        if output.targets > tokens:
            raise ProtocolError(f"a micro-batch of {tokens} tokens has {output.targets} targets")
        self._announced = announced
        self._added += 1
        self._rows += output.hidden.shape[0]
        self._targets += output.targets
        if self._rows > limits.rows:
            raise ProtocolError(
                f"a step of {self._rows} rows came; train.batch-size × train.accumulation allow "
                f"{limits.rows}"
            )
        # The sum is known for certain only with the last micro-batch; until then no more than
        # this can be still to come.
        to_come = (output.micro_batches - self._added) * self._longest
        if not self._targets <= output.step_targets <= self._targets + to_come:
            raise ProtocolError(
                f"a step of {output.step_targets} targets has {self._targets} after "
                f"{self._added} of {output.micro_batches} micro-batches"
            )
