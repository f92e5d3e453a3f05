"""The ServerApp: read the config, run the strategy, and save the results."""

import shutil
import uuid
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from federation.agreed_rows import agreed_rows_of
from federation.authentication import signer_of
from federation.messages import to_arrays
from federation.methods import StrategyName
from federation.run_config import ConfigError, RunConfig, parse_run_config
from federation.run_folder import (
    METRICS_FILE,
    SUMMARY,
    announce,
    check_resumable,
    checkpoint_files,
    end_status,
    read_status,
    running,
)
from finetuning.adapters.adapted_modules import with_names
from finetuning.adapters.adapter import State, initial_adapter
from finetuning.adapters.saved import read_fitting
from finetuning.files import write_file
from finetuning.model.fingerprint import fingerprint
from finetuning.model.positions import check_positions
from finetuning.randomness import derive_seed
from server_app.checkpoint import RunCheckpoint, check_base_model, load_run_checkpoint
from server_app.results import Results, new_directory
from server_app.summary import summary
from strategies.fedjudge import FedJudgeBase, FedJudgeCL, FedProx
from strategies.fl_glm import FLGLM
from strategies.groups import require_members
from strategies.journal import Progress
from strategies.rounds import Rounds

app = ServerApp()

# The class of each method in federation/methods.py.
STRATEGIES: dict[StrategyName, type[Rounds]] = {
    "fedjudge-base": FedJudgeBase,
    "fedjudge-cl": FedJudgeCL,
    "fedprox": FedProx,
    "fl-glm": FLGLM,
}


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all remaining rounds; raise an exception on failure, so that Flower reports it."""
    config = parse_run_config(context.run_config)
    directory = open_directory(config)
    with running(directory):
        # Read the checkpoint while holding the lock: the run to resume may have ended just before.
        checkpoint = find_checkpoint(config, directory)
        log(INFO, "Results: %s", directory)
        try:
            _run(grid=grid, config=config, directory=directory, checkpoint=checkpoint)
        except BaseException as error:
            if (directory / METRICS_FILE).exists():
                log(INFO, "Results so far: %s", directory)
                if checkpoint_files(directory):
                    log(INFO, 'To continue: resume = "%s"', directory)
                _show_end(directory, f"{type(error).__name__}: {error}")
            elif not config.resume:  # the run was refused before any computation
                shutil.rmtree(directory)
            raise
        _show_summary(directory)
        _show_end(directory)


def _run(grid: Grid, config: RunConfig, directory: Path, checkpoint: RunCheckpoint | None) -> None:
    kind = STRATEGIES[config.strategy]
    signer, agreed = signer_of(config, grid), agreed_rows_of(grid)
    require_members(config, grid)
    base = kind.locate_base_model(config)
    check_positions(base, config.row_with_answer)
    if (found := with_names(base, config.adapter)) != config.adapter:
        log(INFO, "adapter.targets: %s", found.targets)
        config = config.with_targets(found.targets)
    if checkpoint is not None:
        check_resumable(directory, config)
    digests = fingerprint(base)
    state, peft_config = first_adapter(config, base, with_initial=checkpoint is None)
    if checkpoint is not None:
        check_base_model(directory, digests)
    results = Results(directory, config, base, peft_config)
    if checkpoint is None:
        progress = Progress(lineage=uuid.uuid4().hex)
    else:
        progress, state = checkpoint.progress, checkpoint.state
        results.rewind_to(checkpoint)
        log(INFO, "Resuming after round %d of %s", progress.finished_rounds, directory)
    results.describe(digests, progress.lineage)
    announce(directory)
    try:
        if _is_over(progress, config):
            results.checkpoint(progress, state)  # writes what the killed process didn't
            return
        strategy = kind(config, digests, progress, results, signer, agreed)
        strategy.start(grid, to_arrays(state), config.rounds, timeout=config.reply_timeout)
    finally:
        results.close()


def first_adapter(config: RunConfig, base: Path, with_initial: bool = True) -> tuple[State, Any]:
    """Return the global adapter before round 1, and its PEFT configuration.

    A resumed run doesn't need to read ``initial-adapter``. Raise ``AdapterError`` if
    ``initial-adapter`` can't be used, or ``BaseModelError`` if the adapter settings are
    incompatible with the base model.
    """
    seed = derive_seed("adapter", config.seed)
    state, peft_config = initial_adapter(
        name=config.model.name, settings=config.adapter, seed=seed, directory=base
    )
    if config.initial_adapter and with_initial:
        folder = Path(config.initial_adapter).expanduser()
        state = read_fitting(folder, config.adapter, state)
    return state, peft_config


def _show_end(directory: Path, problem: str = "") -> None:
    """Write the run's final status; an error, such as a full disk, is only logged."""
    try:
        end_status(directory, problem)
    except (OSError, ValueError) as error:
        log(WARNING, "The run's status can't be written: %s", error)


def _show_summary(directory: Path) -> None:
    """Log a completed run's tables, and write them to a file; a write error is only logged."""
    text = summary(directory)
    log(INFO, "%s", text)
    try:
        write_file(directory / SUMMARY, text.strip("\n") + "\n")
    except OSError as error:
        log(WARNING, "The run's summary can't be written: %s", error)


def open_directory(config: RunConfig) -> Path:
    """Return the results folder: a new folder, or the folder of the run to resume.

    Raise ``ConfigError`` if the folder can't be written to, or the run can't be resumed.
    """
    if not config.resume:
        return new_directory(config)
    directory = Path(config.resume).expanduser()
    check_resumable(directory, config)
    return directory


def find_checkpoint(config: RunConfig, directory: Path) -> RunCheckpoint | None:
    """Return the checkpoint to resume from, or None for a new run.

    Raise ``ConfigError`` if the run has already completed its rounds. A run that was killed after
    its last checkpoint has not: the resumed run writes the missing results.
    """
    if not config.resume:
        return None
    checkpoint, status = load_run_checkpoint(directory), read_status(directory)
    finished = checkpoint.progress.finished_rounds
    is_complete = status.phase == "completed" or status.rounds != config.rounds
    if is_complete and _is_over(checkpoint.progress, config):
        raise ConfigError(
            f'resume = "{directory}" has finished its {finished} rounds; raise rounds to continue'
        )
    return checkpoint


def _is_over(progress: Progress, config: RunConfig) -> bool:
    """Return whether all rounds are finished and evaluated."""
    return progress.finished_rounds >= config.rounds and progress.evaluated
