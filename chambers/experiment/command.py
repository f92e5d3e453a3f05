"""``chambers experiment``: carry out the runs of a file, and write its tables and plots."""

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from chambers.errors import CommandError
from chambers.experiment.plan import Experiment, Measure, Size, read_experiment, runs_of
from chambers.settings import count_clients, with_absolute_paths, with_least_nodes
from chambers.sources import argument, count, option
from federation.run_config import RunConfig, Scalar, parse_run_config

RESULTS = "results.jsonl"
_OF_PERSONS = ("facts", "sampled", "exposure")
_LIBRARIES = ("chambers", "flwr", "torch", "transformers", "peft")


@dataclass(frozen=True)
class Experimenting:
    """Carry out an experiment: runs, tables and plots.

    \b
      chambers experiment experiments/code-of-the-province.toml --size small --jobs 2

    FILE lists runs, seeds, measures and tables, as docs/experiments.md describes. The command
    writes results.jsonl, the tables as Markdown, and plots as SVG to the output folder.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    file: Annotated[Path, argument("FILE.toml")]
    size: Annotated[str, option("Name of a size in FILE.toml; default small.", "NAME")] = "small"
    output: Annotated[Path | None, option("Folder; default runs/FILE-SIZE.", "FOLDER")] = None
    jobs: Annotated[int, count("Number of concurrent runs; default 1.")] = 1
    resume: Annotated[bool, typer.Option("--resume", help="Continue the experiment.")] = False
    render: Annotated[bool, typer.Option("--render", help="Only render recorded results.")] = False

    def __call__(self) -> int:
        """Carry out the experiment; the exit status is 0 only if all runs completed."""
        from chambers.experiment.pages import write_pages
        from chambers.experiment.results import read_records

        experiment = read_experiment(self.file)
        size = experiment.sizes.get(self.size)
        if size is None:
            raise CommandError(
                f"{self.file} has no size {self.size}; its sizes are {', '.join(experiment.sizes)}"
            )
        folder = (self.output or Path("runs") / f"{self.file.stem}-{self.size}").absolute()
        results = folder / RESULTS
        if not self.render:
            if folder.exists() and not self.resume:
                raise CommandError(f"{folder} exists; add --resume to continue the experiment")
            self._measure(experiment, size, folder)
        elif not results.is_file():
            raise CommandError(f"there is no {results}; run the experiment without --render")
        about, records = read_records(results)
        if self.render:
            self._check_recorded(experiment, size, about, results)
        known = [run["versions"].items() for run in about["runs"].values() if "versions" in run]
        names = [name for name, _ in set(chain(*known))]
        for name in sorted({name for name in names if names.count(name) > 1}):
            print(f"runs had different versions of {name}: see {results}", file=sys.stderr)
        print(write_pages(experiment, records, folder))
        return 0

    def _check_recorded(
        self, experiment: Experiment, size: Size, about: Mapping[str, Any], results: Path
    ) -> None:
        """Print which runs are missing in results or had other settings.

        Raise ``CommandError`` if the results are those of another experiment or size.
        """
        given = about["experiment"], about["size"]
        if given != (self.file.name, self.size):
            raise CommandError(f"{results} has the results of {given[0]}, size {given[1]}")
        shown = {arm for table in experiment.tables for arm in (*table.arms, table.against)}
        # The clients with runs of their own are known only if their data are.
        for run in runs_of(experiment, size, dict.fromkeys(experiment.variants, ())):
            recorded = about["runs"].get(run.name)
            if run.arm in shown and recorded is None:
                print(f"not recorded: {run.name}", file=sys.stderr)
            elif recorded is not None:
                other = [k for k, v in run.recorded.items() if recorded.get(k, v) != v]
                if other:
                    print(f"recorded with another {', '.join(other)}: {run.name}", file=sys.stderr)

    def _measure(self, experiment: Experiment, size: Size, folder: Path) -> None:
        from chambers.experiment.measuring import measure_run, measure_untrained
        from chambers.experiment.questions import client_names, groups_of
        from chambers.experiment.results import RESERVED, write_records
        from chambers.experiment.running import check_settings, digest_of_data, versions_of

        common = experiment.settings | size.settings
        configs = {
            variant: self._check_settings(common | own, f"variants.{variant}")
            for variant, own in experiment.variants.items()
        }
        self._refuse_measures(experiment, configs)
        clients = {variant: client_names(config) for variant, config in configs.items()}
        alone = [name for name, arm in experiment.arms.items() if arm.each_client]
        for names, arm in product(clients.values(), alone):
            if not names:
                raise CommandError(f"{self.file}: {arm} needs a folder for each client")
        for name in RESERVED.intersection(chain(*clients.values())):
            raise CommandError(f"{self.file}: a client's folder can't be called {name}")
        runs = {
            run: self._check_settings(run.settings, f"arms.{run.arm}", run.clients)
            for run in runs_of(experiment, size, clients)
        }
        for run, config in runs.items():
            if experiment.arms[run.arm].personalised and config.sums.enabled:
                raise CommandError(
                    f"{self.file}: arms.{run.arm}: personalised = true is not for sums.enabled = "
                    "true, with which the clients keep their adapters"
                )
        groups = {
            (variant, seed): groups_of(config, variant, seed, experiment.questions)
            for variant, config in configs.items()
            for seed in size.seeds
        }
        folder.mkdir(parents=True, exist_ok=True)
        data = {variant: digest_of_data(config) for variant, config in configs.items()}
        for run in runs:
            check_settings(run, folder, data[run.variant])
        with (folder / "commits.txt").open("a", encoding="utf-8") as file:
            print(_commit(), file=file)  # a continued experiment keeps the results before
        with ProcessPoolExecutor(
            self.jobs, get_context("spawn"), initializer=_set_up, initargs=(self.jobs,)
        ) as pool:
            futures = [
                pool.submit(
                    measure_untrained,
                    experiment,
                    seed,
                    configs[variant],
                    own,
                    folder / "-".join(filter(None, ("untrained", variant, f"seed-{seed}.jsonl"))),
                )
                for (variant, seed), own in groups.items()
            ]
            for run, config in runs.items():
                own = groups[run.variant, run.seed]
                futures.append(pool.submit(measure_run, experiment, run, config, folder, own))
            try:
                records = [record for future in futures for record in future.result()]
            except BrokenProcessPool as error:
                raise CommandError(
                    "a process of the experiment was killed, perhaps because memory ran out: "
                    "continue with --resume and a smaller --jobs"
                ) from error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        commits = (folder / "commits.txt").read_text(encoding="utf-8").split()
        about = {
            "experiment": self.file.name,
            "size": self.size,
            "commit": ", ".join(dict.fromkeys(commits)),
            "versions": {name: version(name) for name in _LIBRARIES},
            "runs": {
                run.name: run.recorded | {"versions": versions_of(run, folder)} for run in runs
            },
        }
        write_records(folder / RESULTS, about, records)

    def _check_settings(
        self, settings: Mapping[str, Scalar], place: str, clients: int | None = None
    ) -> RunConfig:
        """Check settings before the first run starts; an error names their place in the file."""
        values = with_absolute_paths(settings)
        try:
            sample = parse_run_config(with_least_nodes(values))
            training = (clients or count_clients(values)) - len(sample.excluded)
            values.setdefault("min-nodes", sample.sampled(training))
            return parse_run_config(values)
        except ValueError as error:
            raise CommandError(f"{self.file}: {place}: {error}") from error

    def _refuse_measures(self, experiment: Experiment, configs: Mapping[str, RunConfig]) -> None:
        from chambers.experiment.questions import client_names
        from finetuning.tasks.tasks import TASKS

        measures = {table.measure for table in experiment.tables}
        for config in configs.values():
            if config.data.path and "article" in measures:
                raise CommandError(f"{self.file}: the measure article can't be used with data.path")
            if (problem := _problem_of_leaks(measures, config)) is not None:
                raise CommandError(f"{self.file}: {problem}")
            if len(client_names(config)) < 2 and any(t.columns == "own" for t in experiment.tables):
                raise CommandError(
                    f'{self.file}: columns = "own" needs several clients with data of their own'
                )
            task = TASKS.get(config.data.task)
            if "accuracy" in measures and not (task and task.is_cloze):
                raise CommandError(
                    f"{self.file}: the measure accuracy needs a data.task with candidate answers"
                )


def _problem_of_leaks(measures: Collection[Measure], config: RunConfig) -> str | None:
    """Return why what models reveal can't be measured with a data set; None if it can."""
    from chambers.experiment.questions import client_names

    kind = "" if config.data.path else config.data.generated
    if kind != "persons" and any(each.startswith(_OF_PERSONS) for each in measures):
        return f'the measures {", ".join(_OF_PERSONS)} need data.generated = "persons"'
    if "membership" in measures and (kind == "persons" or not client_names(config)):
        return "the measure membership needs matters, or a folder for each client"
    if "extracted" in measures and (kind or not client_names(config)):
        return "the measure extracted needs a folder for each client"
    return None


def _set_up(jobs: int) -> None:
    """Set up a process of the pool, before it imports the libraries that read the environment."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1"}
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"


def _commit() -> str:
    """Return this checkout's commit, marked if files have changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    # An installed copy may lie in a checkout of something else.
    for words in (["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty"]):
        try:
            done = subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        except OSError:
            return "unknown"
        if done.returncode:
            return "unknown"
    return done.stdout.strip()
