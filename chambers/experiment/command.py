"""``chambers experiment``: carry out the runs of a file, and write its tables and plots."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from chambers.errors import CommandError
from chambers.experiment.plan import Experiment, Run, Size, read_experiment, runs_of
from chambers.sources import option
from chambers.train import read_settings, with_absolute_paths
from federation.run_config import RunConfig, parse_run_config

RESULTS = "results.jsonl"
_LIBRARIES = ("chambers", "flwr", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Experimenting:
    """Carry out an experiment: runs, tables and plots.

    \b
      chambers experiment experiments/code-of-the-province.toml --size small --jobs 2

    FILE lists runs, seeds, measures, tables and plots; docs/experiments.md describes it. Each run
    is one of `chambers train`. The folder has results.jsonl, tables.md, a CSV file for each table
    and an SVG file for each plot.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    file: Annotated[Path, typer.Argument(metavar="FILE.toml")]
    size: Annotated[str, option("Size of the experiment; default small.", "NAME")] = "small"
    output: Annotated[
        Path | None, option("Folder of the experiment; default runs/FILE-SIZE.", "FOLDER")
    ] = None
    jobs: Annotated[int, option("Number of runs at once; default 1.", "N")] = 1
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the experiment in the folder.")
    ] = False
    render: Annotated[
        bool, typer.Option("--render", help="Only write tables and plots of recorded results.")
    ] = False

    def __call__(self) -> int:
        """Carry out the experiment; the exit status is 0 only if all runs completed."""
        from chambers.experiment.pages import write_pages
        from chambers.experiment.records import read_records

        experiment = read_experiment(self.file)
        size = experiment.sizes.get(self.size)
        if size is None:
            raise CommandError(
                f"{self.file} has no size {self.size}; there are {', '.join(experiment.sizes)}"
            )
        if self.jobs < 1:
            raise CommandError(f"--jobs {self.jobs}: must be at least 1")
        folder = (self.output or Path("runs") / f"{self.file.stem}-{self.size}").absolute()
        results = folder / RESULTS
        if not self.render:
            if folder.exists() and not self.resume:
                raise CommandError(f"{folder} exists; add --resume to continue the experiment")
            self._measure(experiment, size, folder, results)
        elif not results.is_file():
            raise CommandError(f"there is no {results}; run the experiment without --render")
        print(write_pages(experiment, read_records(results), folder))
        return 0

    def _measure(self, experiment: Experiment, size: Size, folder: Path, results: Path) -> None:
        from chambers.experiment.carry_out import carry_out
        from chambers.experiment.measuring import Measuring, measure
        from chambers.experiment.questions import client_names, groups_of
        from chambers.experiment.records import write_records

        configs = {name: self._config(experiment, size, name) for name in experiment.variants}
        clients = {name: client_names(config) for name, config in configs.items()}
        runs = list(runs_of(experiment, size, clients))
        measures = sorted({table.measure for table in experiment.tables})
        for config in configs.values():
            if config.data.path and "article" in measures:
                raise CommandError(f"{self.file}: only matters have an article to measure")
            if not config.data.task and "accuracy" in measures:
                raise CommandError(f"{self.file}: accuracy is measured on a task (data.task)")
        groups = {
            (variant, seed): groups_of(config, variant, seed, experiment.questions)
            for variant, config in configs.items()
            for seed in size.seeds
        }
        folder.mkdir(parents=True, exist_ok=True)
        directories = carry_out(
            runs,
            experiment.presets,
            folder,
            self.jobs,
            finished=lambda run: print(f"finished: {run.name}", file=sys.stderr),
        )
        records = []
        for variant, config in configs.items():
            measuring = Measuring(config, measures)
            for seed in size.seeds:
                own = [
                    (run, directories[run.name])
                    for run in runs
                    if (run.variant, run.seed) == (variant, seed)
                ]
                records += measure(measuring, experiment, seed, own, groups[variant, seed])
        write_records(results, _about(self.file, self.size, runs), records)

    def _config(self, experiment: Experiment, size: Size, variant: str) -> RunConfig:
        """Check the settings of a variant's runs before the first one starts; return those of all.

        Raises:
            UserError: A preset or a setting is wrong; the message names the arm.

        """
        own = experiment.settings | size.settings | experiment.variants[variant]
        common = read_settings(experiment.presets) | with_absolute_paths(own)
        for name, arm in experiment.arms.items():
            try:
                parse_run_config(common | arm.settings)
            except ValueError as error:
                raise CommandError(f"{self.file}: arms.{name}: {error}") from error
        return parse_run_config(common)


def _about(file: Path, size: str, runs: Sequence[Run]) -> dict[str, object]:
    """Return where results come from: versions, seeds and settings."""
    return {
        "experiment": file.name,
        "size": size,
        "commit": _commit(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "runs": {run.name: dict(run.settings) for run in runs},
    }


def _commit() -> str | None:
    """Return the commit of the checkout that this is, marked if files have changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
