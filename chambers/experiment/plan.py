"""The file of an experiment: its runs, and the tables and plots of their models."""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, ValidationError, field_validator, model_validator

from chambers.errors import CommandError, read_bytes
from chambers.settings import read_settings
from federation.run_config import Scalar
from federation.site_policy import PrivacyPolicy
from finetuning.settings import Section

# ``loss``: loss in nats per token of the reference. ``article``: whether the right one of twelve
# Articles is the likeliest. ``accuracy``: whether a right candidate answer is the likeliest.
_Likelihood = Literal["loss", "article", "accuracy"]
# ``answer``: whether the greedily generated text equals the reference. The rest score this text.
_Text = Literal["answer", "rouge1", "rouge2", "rougeL", "bleu4", "bleu_n"]
# What a model reveals about the clients' training rows; see docs/experiments.md.
Leak = Literal[
    "membership",
    "extracted",
    "facts-1",
    "facts-10",
    "facts-50",
    "sampled",
    "exposure-1",
    "exposure-4",
    "exposure-16",
]
# Means over rounds of what clients report about their training.
Reported = Literal["distance", "penalty_gradient_share"]
Measure = Literal[_Likelihood, _Text, Leak, Reported]
CONSTANT = "constant"  # name of always giving the same answer, in records
ALL, OWN, OTHERS = "all", "own", "others'"  # columns of tables


class Arm(Section):
    """A way of training to compare, such as a strategy, or the untrained base model."""

    label: str  # the arm's name in tables
    settings: dict[str, Scalar] = Field({})
    each_client: bool = False  # whether each client has a run of its own, on its rows alone
    trained: bool = True  # if False, there are no runs, and the base model is measured
    privacy: PrivacyPolicy | None = None  # of the clients' site policies
    personalised: bool = False  # whether the clients' personalised models are measured, too
    clients: int | None = Field(None, gt=0)  # None: the default of `chambers train`

    @model_validator(mode="after")
    def _check_untrained(self) -> "Arm":
        if not self.trained and self.model_fields_set - {"label", "trained"}:
            raise ValueError("with trained = false, there is only a label: no run has settings")
        return self

    @field_validator("privacy")
    @classmethod
    def _check_privacy(cls, value: PrivacyPolicy | None) -> PrivacyPolicy | None:
        if value and (value.epsilon is None or value.account):
            raise ValueError("needs epsilon, and each client has an account of its own")
        return value


class Size(Section):
    """Seeds and settings of all runs at one size."""

    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Scalar] = Field({})


class ResultTable(Section):
    """A table of one measure, with models in rows."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")  # name of the table's files
    title: str
    measure: Measure
    arms: list[str] = Field(min_length=1)  # in the order of the rows
    # ``groups``: a column for each group, and one for all groups of a variant. ``own``: for each
    # variant, a column for a client's own group and one for the others'.
    columns: Literal["groups", "own"] = "groups"
    against: str | None = None  # arm with which the others are compared, question by question
    # By column, the margin within which its differences are tested for equality.
    equal: dict[str, PositiveFloat] = Field({})
    # The paper's values, keyed by arm (``arm client`` for a client's model) and then by column.
    published: dict[str, dict[str, float]] = Field({})


class Plot(Section):
    """A plot of tables' columns, with a panel for each; rows are those of the tables."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")  # name of the plot's file
    tables: list[str] = Field(min_length=1)


class Experiment(Section):
    """The file of an experiment; sizes, variants and arms are keyed by name."""

    title: str
    presets: list[str] = Field([])
    settings: dict[str, Scalar] = Field({})
    questions: int = Field(48, gt=0)  # maximum number of held-out questions for each client
    sizes: dict[str, Size] = Field(min_length=1)
    # Variants by name; each has settings that apply to every arm, such as a different data set.
    variants: dict[str, dict[str, Scalar]] = Field({"": {}}, min_length=1)
    arms: dict[str, Arm] = Field(min_length=1)
    tables: list[ResultTable] = Field(min_length=1)
    plots: list[Plot] = Field([])

    @model_validator(mode="after")
    def _check_names(self) -> "Experiment":
        if CONSTANT in self.arms:
            raise ValueError(f"an arm can't be called {CONSTANT}")
        for table in self.tables:
            published = [name.partition(" ")[0] for name in table.published]
            for arm in (*table.arms, *published, table.against):
                if arm is not None and arm not in self.arms:
                    raise ValueError(
                        f"{table.name} names the arm {arm}; the arms are {', '.join(self.arms)}"
                    )
            if table.measure in {"membership", "extracted"}:
                for arm in table.arms:
                    if not self.arms[arm].trained:
                        raise ValueError(f"{table.name}: {arm} has no training rows to recognise")
        names = [table.name for table in self.tables]
        for plot in self.plots:
            for name in plot.tables:
                if name not in names:
                    raise ValueError(
                        f"{plot.name} names the table {name}; the tables are {', '.join(names)}"
                    )
        return self

    @model_validator(mode="after")
    def _check_repeated(self) -> "Experiment":
        for what, names in (
            ("tables", [table.name for table in self.tables]),
            ("plots", [plot.name for plot in self.plots]),
            ("arms' labels", [arm.label for arm in self.arms.values()]),  # rows of plots
        ):
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                raise ValueError(f"several {what} are {repeated[0]}")
        return self

    @model_validator(mode="after")
    def _check_margins(self) -> "Experiment":
        for table in self.tables:
            kinds = [OWN, OTHERS] if table.columns == "own" else [ALL]
            compared = [of_variant(*names) for names in product(self.variants, kinds)]
            if table.columns == "groups":
                compared += filter(None, self.variants)  # whose clients share a data set
            if not table.equal.keys() <= {*compared}:
                raise ValueError(f"{table.name}: equal must be of {' or '.join(compared)}")
            if table.equal and not table.against:
                raise ValueError(f"{table.name}: equal needs against, the arm to compare with")
        return self

    @property
    def shares_questions(self) -> bool:
        """Whether all seeds have the same questions: those of files, instead of generated ones."""
        pairs = product(self.sizes.values(), self.variants.values())
        return any((self.settings | size.settings | own).get("data.path") for size, own in pairs)


def of_variant(variant: str, name: str) -> str:
    """Return the name of a variant's group of questions or column; ``variant`` may be empty."""
    return " ".join(filter(None, (variant, name)))


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment."""

    arm: str
    variant: str  # empty if there are no variants
    seed: int  # also determines how the data are divided
    client: str | None  # client that is trained alone; None if all are trained
    clients: int | None  # number of simulated clients; None for the default
    privacy: PrivacyPolicy | None = field(hash=False)  # of each client's site policy
    settings: Mapping[str, Scalar] = field(hash=False)  # without output-dir and state-path

    @property
    def recorded(self) -> dict[str, Any]:
        """What is recorded about the run: its settings, number of clients and privacy."""
        others: dict[str, Any] = {"clients": self.clients} if self.clients else {}
        if self.privacy:
            others["privacy"] = self.privacy.model_dump(by_alias=True)
        return dict(self.settings) | others

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        parts = (self.arm, self.variant, self.client, f"seed-{self.seed}")
        return "-".join(filter(None, parts))


def read_experiment(file: Path) -> Experiment:
    """Read an experiment's file, with the presets' settings among its settings.

    Raise ``CommandError`` if the file or a preset is unreadable, or a key is wrong.
    """
    try:
        experiment = Experiment.model_validate(tomllib.loads(read_bytes(file).decode("utf-8-sig")))
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}"
            for each in error.errors()
        )
        raise CommandError(f"{file}: {'; '.join(problems)}") from error
    except ValueError as error:
        raise CommandError(f"{file} is not TOML: {error}") from error
    settings = read_settings(experiment.presets) | experiment.settings
    return experiment.model_copy(update={"settings": settings})


def runs_of(
    experiment: Experiment, size: Size, clients: Mapping[str, Sequence[str]]
) -> Iterator[PlannedRun]:
    """Yield an experiment's runs, seed by seed; ``clients`` has the clients' names by variant."""
    for seed, variant in product(size.seeds, experiment.variants):
        own = experiment.settings | size.settings | experiment.variants[variant]
        for name, arm in experiment.arms.items():
            settings = own | arm.settings | {"seed": seed}
            pools = clients[variant] if arm.each_client else [None]
            for client in pools if arm.trained else ():
                pool = {"data.pool": client} if client else {}
                yield PlannedRun(
                    arm=name,
                    variant=variant,
                    seed=seed,
                    client=client,
                    clients=None if client else arm.clients,
                    privacy=arm.privacy,
                    settings=settings | pool,
                )
