"""A train or evaluate message at a client, and the local round that the message requests."""

from dataclasses import dataclass
from logging import WARNING

from flwr.app import Message
from flwr.common import log

from client_app.institution import Institution
from client_app.policy import check_steps
from client_app.site import Site
from client_app.state import ClientState
from federation.messages import Instruction
from federation.run_config import RunConfig
from federation.sums.announcement import Group
from finetuning.adapters.adapter import State
from finetuning.data.batching import round_steps, steps_per_round
from finetuning.errors import DeadlineError
from finetuning.randomness import derive_seed
from finetuning.training.loop import LocalRound, TrainingReport
from finetuning.training.optimization import OptimizerState

Metrics = dict[str, int | float]

# More optimizer steps per second than any machine can do.
_MAX_STEPS_A_SECOND = 1000


@dataclass(frozen=True)
class ClientTask:
    """A train or evaluate message, with all data needed to answer it."""

    message: Message
    instruction: Instruction  # the message's instruction, without what the site's policy refuses
    config: RunConfig
    institution: Institution
    site: Site
    state: ClientState
    arrays: dict[str, State]  # the message's adapters by record name
    deadline: float  # on the clock of ``time.monotonic``
    group: Group | None = None  # of masked sums, if the run has them

    @property
    def title(self) -> str:
        """Label of the progress bar."""
        return f"{self.institution.name}, round {self.instruction.round}"

    def local_round(self, average_every: int = 0) -> LocalRound:
        """Return the steps of this round with their examples, and the deadline.

        ``average_every`` is the number of steps after which adapters are sent; 0 means never. Raise
        ``PolicyError`` if the site's policy doesn't allow these steps, or ``DeadlineError`` if
        there are too many for the time limit.
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
        if policy := self.site.policy:
            check_steps(policy, self.institution.train, steps, average_every)
        return LocalRound(
            steps=steps,
            first_step=(number - 1) * per_round,
            total_steps=self.config.rounds * per_round,
            seed=derive_seed("train", self.config.seed, name, number),
            deadline=self.deadline,
        )

    def steps(self, examples: int) -> int:
        """Return the number of steps of a round, checked before the list of steps is allocated.

        Raise ``DeadlineError`` if there are too many steps for the time limit.
        """
        steps, seconds = steps_per_round(examples, self.config.train), self.instruction.time_limit
        if steps > seconds * _MAX_STEPS_A_SECOND:
            raise DeadlineError(
                f"{steps} steps can't be done in {seconds:g} s: lower train.epochs or "
                "train.local-steps, or raise round-timeout"
            )
        return steps

    def saved_optimizer(self) -> OptimizerState | None:
        """Return the newest optimizer state if ``train.optimizer-state`` is ``keep``, or None.

        Remove the state of this and later rounds, which a resumed run repeats.
        """
        number = self.instruction.round
        self.state.forget_from(number)
        if self.config.train.optimizer_state != "keep":
            return None
        optimizer = self.state.optimizer(number - 1)
        if number > 1 and not optimizer:
            log(WARNING, "%s starts with a new optimizer: no state is saved", self.institution.name)
        return optimizer

    def save(self, adapter: State, optimizer: OptimizerState, counted: int | None = None) -> None:
        """Save the local adapter and, if ``optimizer-state`` is ``keep``, the optimizer state.

        ``counted`` is the last round whose adapter the server averaged; it isn't deleted.
        """
        keeps = self.config.train.optimizer_state == "keep"
        self.state.save(self.instruction.round, adapter, optimizer if keeps else {}, counted)


def training_metrics(report: TrainingReport) -> Metrics:
    """Return the training metrics that all strategies report."""
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
