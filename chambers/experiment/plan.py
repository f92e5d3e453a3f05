"""The file of an experiment: its runs, and the tables and plots of their models."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chambers.errors import CommandError
from federation.run_config import Scalar

Measure = Literal[
    "loss",
    "article",
    "accuracy",
    "answer",
    "rouge1",
    "rouge2",
    "rougeL",
    "bleu4",
    "bleu_n",
    "distance",
    "penalty_gradient_share",
]
# Names become names of files.
_NAME = r"^[a-z0-9][a-z0-9-]*$"


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )


class Arm(_Section):
    """One way to train.

    Attributes:
        label: Its name in tables.
        settings: Settings of its runs.
        each_client: Whether there is a run for each client, on the client's rows alone.
        trained: Whether there are runs at all; without them, the base model is measured.
        personalised: Whether the clients' personalised models are measured, too.
        clients: Number of simulated clients; None for as many as `chambers train` starts.

    """

    label: str
    settings: dict[str, Scalar] = {}
    each_client: bool = False
    trained: bool = True
    personalised: bool = False
    clients: int | None = Field(None, gt=0)


class Size(_Section):
    """Seeds and settings of all runs at one size."""

    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Scalar] = {}


class Table(_Section):
    """A table of one measure, with models in rows.

    Attributes:
        name: Name of its files.
        title: Its heading.
        measure: What is measured.
        arms: Arms in the order of rows.
        columns: ``groups`` of questions, or ``own``: clients' models on their own client's
            questions, and on the others'.
        against: Arm with which the others are compared, question by question.
        heat_map: Whether the values are drawn, too, by model and group of questions.
        published: Values of the paper, by arm (``arm client`` for a client's model) and column.

    """

    name: str = Field(pattern=_NAME)
    title: str
    measure: Measure
    arms: list[str] = Field(min_length=1)
    columns: Literal["groups", "own"] = "groups"
    against: str | None = None
    heat_map: bool = False
    published: dict[str, dict[str, float]] = {}


class Experiment(_Section):
    """A file of an experiment.

    Attributes:
        title: Heading of its page.
        presets: Presets of all runs, in order.
        settings: Settings of all runs.
        questions: Maximum number of held-out questions for each client.
        sizes: Sizes, by name.
        variants: Settings with which every arm is carried out, by name: data sets, for example.
        arms: Ways to train, by name.
        tables: Tables to write.

    """

    title: str
    presets: list[str] = []
    settings: dict[str, Scalar] = {}
    questions: int = Field(48, gt=0)
    sizes: dict[str, Size] = Field(min_length=1)
    variants: dict[str, dict[str, Scalar]] = Field({"": {}}, min_length=1)
    arms: dict[str, Arm] = Field(min_length=1)
    tables: list[Table] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_names(self) -> "Experiment":
        for table in self.tables:
            against = [table.against] if table.against else []
            published = [name.partition(" ")[0] for name in table.published]
            for arm in (*table.arms, *against, *published):
                if arm not in self.arms:
                    raise ValueError(
                        f"{table.name} names the arm {arm}; there are {', '.join(self.arms)}"
                    )
        return self


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        arm: Name of its arm.
        variant: Name of its variant; empty if there are none.
        seed: Its seed, which also divides the data.
        client: The client that it trains alone; None for all.
        clients: Number of simulated clients; None for the default.
        settings: All its settings but for presets and paths.

    """

    arm: str
    variant: str
    seed: int
    client: str | None
    clients: int | None
    settings: Mapping[str, Scalar] = field(hash=False)

    @property
    def name(self) -> str:
        """Name of its folder."""
        parts = (self.arm, self.variant, self.client, f"seed-{self.seed}")
        return "-".join(filter(None, parts))


def read_experiment(file: Path) -> Experiment:
    """Read the file of an experiment.

    Raises:
        CommandError: It can't be read, or a key is wrong.

    """
    try:
        return Experiment.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}"
            for each in error.errors()
        )
        raise CommandError(f"{file}: {'; '.join(problems)}") from error
    except ValueError as error:
        raise CommandError(f"{file} is not TOML: {error}") from error


def runs_of(
    experiment: Experiment, size: Size, clients: Mapping[str, Sequence[str]]
) -> Iterator[Run]:
    """Yield the runs of an experiment, seed by seed.

    Args:
        experiment: The experiment.
        size: Its size.
        clients: Names of the clients in each variant.

    """
    for seed, variant in product(size.seeds, experiment.variants):
        own = experiment.settings | size.settings | experiment.variants[variant]
        for name, arm in experiment.arms.items():
            settings = own | arm.settings | {"seed": seed}
            if arm.trained and arm.each_client:
                for client in clients[variant]:
                    pooled = settings | {"data.pool": client}
                    yield Run(name, variant, seed, client, None, pooled)
            elif arm.trained:
                yield Run(name, variant, seed, None, arm.clients, settings)
