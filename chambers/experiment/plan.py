"""The file of an experiment: its runs, and the tables and plots of their models."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from chambers.errors import CommandError
from federation.run_config import Scalar

Measure = Literal["article", "answer", "loss"]
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

    """

    label: str
    settings: dict[str, Scalar] = {}
    each_client: bool = False
    trained: bool = True
    personalised: bool = False


class Size(_Section):
    """Seeds and settings of all runs at one size."""

    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Scalar] = {}


class Table(_Section):
    """A table of one measure: models in rows, and the groups of questions in columns.

    Attributes:
        name: Name of its files.
        title: Its heading.
        measure: What is measured.
        arms: Arms in the order of rows.
        against: Arm with which the others are compared, question by question.
        published: Values of the paper, by arm.

    """

    name: str = Field(pattern=_NAME)
    title: str
    measure: Measure
    arms: list[str] = Field(min_length=1)
    against: str | None = None
    published: dict[str, float] = {}


class Plot(_Section):
    """A heat map of one measure: models in rows, and the groups of questions in columns."""

    name: str = Field(pattern=_NAME)
    title: str
    measure: Measure
    arms: list[str] = Field(min_length=1)


class Experiment(_Section):
    """A file of an experiment.

    Attributes:
        title: Heading of its page.
        presets: Presets of all runs, in order.
        settings: Settings of all runs.
        questions: Number of held-out questions on each client's matters.
        sizes: Sizes, by name.
        arms: Ways to train, by name.
        tables: Tables to write.
        plots: Plots to draw.

    """

    title: str
    presets: list[str] = []
    settings: dict[str, Scalar] = {}
    questions: int = Field(48, gt=0)
    sizes: dict[str, Size] = Field(min_length=1)
    arms: dict[str, Arm] = Field(min_length=1)
    tables: list[Table] = []
    plots: list[Plot] = []

    @model_validator(mode="after")
    def _check_names(self) -> "Experiment":
        parts: list[Table | Plot] = [*self.tables, *self.plots]
        for part in parts:
            against = [part.against] if isinstance(part, Table) and part.against else []
            for arm in (*part.arms, *against):
                if arm not in self.arms:
                    raise ValueError(
                        f"{part.name} names the arm {arm}; there are {', '.join(self.arms)}"
                    )
        return self


@dataclass(frozen=True)
class Run:
    """One run of an experiment.

    Attributes:
        arm: Name of its arm.
        seed: Its seed, which also divides the data.
        client: The client that it trains alone; None for all.
        settings: All its settings but for presets and paths.

    """

    arm: str
    seed: int
    client: str | None
    settings: Mapping[str, Scalar]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return "-".join(filter(None, (self.arm, self.client, f"seed-{self.seed}")))


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


def runs_of(experiment: Experiment, size: Size, clients: list[str]) -> Iterator[Run]:
    """Yield the runs of an experiment, seed by seed."""
    for seed in size.seeds:
        for name, arm in experiment.arms.items():
            settings = experiment.settings | size.settings | arm.settings | {"seed": seed}
            if arm.trained and arm.each_client:
                for client in clients:
                    yield Run(name, seed, client, settings | {"data.pool": client})
            elif arm.trained:
                yield Run(name, seed, None, settings)
