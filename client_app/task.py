"""A train or evaluate message at a client, and the local round that it requests."""

from dataclasses import dataclass
from logging import WARNING

from flwr.app import Message
from flwr.common import log

from client_app.institution import Institution
from client_app.site import Site
from client_app.state import ClientState
from federation.messages import Instruction
from federation.run_config import RunConfig
from finetuning.adapters.adapter import State
from finetuning.data.batching import round_steps, steps_per_round
from finetuning.randomness import derive_seed
from finetuning.training.deadline import DeadlineError
from finetuning.training.loop import LocalRound, TrainingReport
from finetuning.training.optimization import OptimizerState

Metrics = dict[str, int | float]

# More than any machine does.
_MAX_STEPS_A_SECOND = 1000


@dataclass(frozen=True)
class Task:
    """A train or evaluate message, with everything needed to carry it out.

    Attributes:
        message: The message itself.
        instruction: Number of the round, and what to do.
        config: The run's configuration.
        institution: The client's data.
        site: The institution's policy and audit log.
        state: The client's files from earlier rounds.
        arrays: The message's adapters by record name.
        deadline: Deadline on ``time.monotonic``'s clock.

    """

    message: Message
    instruction: Instruction
    config: RunConfig
    institution: Institution
    site: Site
    state: ClientState
    arrays: dict[str, State]
    deadline: float

    @property
    def title(self) -> str:
        """Text before the progress bar."""
        return f"{self.institution.name}, round {self.instruction.round}"

    def local_round(self, average_every: int = 0) -> LocalRound:
        """Return the examples of this round in order, and the deadline.

        Args:
            average_every: Steps after which adapters leave within the round; 0 if they don't.

        Raises:
            PolicyError: They are fewer than the site's policy allows.
            DeadlineError: They are more than can be trained on in time.

        """
        settings, name, number = self.config.train, self.institution.name, self.instruction.round
        lengths = [len(example.tokens) for example in self.institution.train]
        per_round = self.steps(len(lengths))
        steps = round_steps(
            lengths=lengths,
            settings=settings,
            round_number=number,
            seed=derive_seed("order", self.config.seed, name),
        )
        self.site.check_steps(self.institution.train, steps, average_every)
        return LocalRound(
            steps=steps,
            first_step=(number - 1) * per_round,
            total_steps=self.config.rounds * per_round,
            seed=derive_seed("train", self.config.seed, name, number),
            deadline=self.deadline,
        )

    def steps(self, examples: int) -> int:
        """Return the number of steps of a round, before as many are listed in memory.

        Raises:
            DeadlineError: They can't be done in the client's time.

        """
        steps, seconds = steps_per_round(examples, self.config.train), self.instruction.time_limit
        if steps > seconds * _MAX_STEPS_A_SECOND:
            raise DeadlineError(
                f"{steps} steps can't be done in {seconds:g} s: lower train.epochs or "
                "train.local-steps, or raise round-timeout"
            )
        return steps

    def saved_optimizer(self) -> OptimizerState | None:
        """Return the previous round's optimizer state if the run config keeps it.

        State of this and later rounds is removed: a resumed run repeats them.
        """
        number = self.instruction.round
        self.state.forget_from(number)
        if self.config.train.optimizer_state != "keep":
            return None
        optimizer = self.state.optimizer(number - 1)
        if number > 1 and not optimizer:
            log(WARNING, "%s: no saved optimizer state; starting fresh", self.institution.name)
        return optimizer

    def save(self, adapter: State, optimizer: OptimizerState, counted: int | None = None) -> None:
        """Save the local adapter, and the optimizer's state if the run config keeps it.

        Args:
            adapter: The local adapter.
            optimizer: The optimizer's state.
            counted: The last round whose adapter the server has counted, if it is needed.

        """
        keeps = self.config.train.optimizer_state == "keep"
        self.state.save(self.instruction.round, adapter, optimizer if keeps else {}, counted)


def training_metrics(report: TrainingReport) -> Metrics:
    """Return the metrics of a round that all strategies report."""
    return {
        "loss": sum(report.losses) / len(report.losses),
        "loss-first": report.losses[0],
        "loss-last": report.losses[-1],
        "steps": len(report.losses),
        "tokens": report.tokens,
        "target-tokens": report.target_tokens,
        "seconds": report.seconds,
        "gradient-norm": report.gradient_norm,
        "learning-rate": report.learning_rate,
    }
