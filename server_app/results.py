"""The results folder of a run: adapters, metrics, checkpoints and report."""

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from safetensors.torch import load_file

from federation.run_config import ConfigError, RunConfig
from federation.run_folder import METRICS_FILE, RunStatus, read_events, results_folder, write_status
from finetuning.adapters.adapter import State, save_adapter
from finetuning.adapters.model_card import model_card
from finetuning.errors import printable
from finetuning.files import (
    filling,
    json_text,
    remove_unfinished,
    remove_whole,
    replacing,
    write_json,
)
from finetuning.model.gguf_file import origin_of
from finetuning.model.locating import reference
from server_app.checkpoint import RunCheckpoint, discard_checkpoint, save_checkpoint
from server_app.report import write_report
from server_app.tracking import Tracking
from strategies.journal import Progress

_PACKAGES = ("flwr", "torch", "transformers", "peft", "bitsandbytes", "tokenizers", "safetensors")


class Results:
    """Writes a run's results; this class implements ``Journal`` for the strategy.

    The folder of the run must exist. ``base`` is the folder of the base model's configuration;
    ``peft_config`` is PEFT's configuration of the adapters.
    """

    def __init__(self, directory: Path, config: RunConfig, base: Path, peft_config: Any) -> None:
        self.directory = directory
        self._config = config
        self._base = base
        self._peft_config = peft_config
        self._sizes: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._lineage = ""
        self._published = 0  # round of the adapters in ``adapters``
        self._releases: dict[str, Mapping[str, str]] = {}  # verdicts of leak tests, by client
        self._metrics = directory / METRICS_FILE
        self._tracking = Tracking(config, directory)

    def describe(self, fingerprint: Mapping[str, str], lineage: str = "") -> None:
        """Write the resolved config, the package versions and the base model's fingerprint.

        After a resumption with other packages, all versions are listed. Cards of adapters name the
        ``lineage``.
        """
        self._lineage = lineage
        origin = origin_of(self._base)
        name = reference(self._config.model.name, self._base)
        base = {"loaded from": name} | ({"gguf": origin} if origin else {})
        versions = {"python": platform.python_version()} | {p: version(p) for p in _PACKAGES}
        write_json(self.directory / "config.json", self._config.flat())
        if (file := self.directory / "versions.json").is_file():
            for name, before in json.loads(file.read_bytes()).items():
                known = [*before.split(", "), versions.get(name)]
                versions[name] = ", ".join(dict.fromkeys(filter(None, known)))
        write_json(file, versions)
        write_json(self.directory / "base-model.json", {**base, "digests": dict(fingerprint)})

    @property
    def scratch(self) -> Path:
        """Folder for temporary files of a round, on the same disk as the results."""
        return self.directory / ".replies"

    def show(self, status: RunStatus) -> None:
        """Replace ``status.json``; an error, such as a full disk, is only logged."""
        try:
            write_status(self.directory, status)
        except OSError as error:
            log(WARNING, "The run's status can't be written: %s", error)

    def record(self, event: Mapping[str, Any]) -> None:
        """Append an event to ``metrics.jsonl``, and send its numbers to the trackers.

        Texts are escaped and shortened, so that no peer's text can make the run fail. Raise
        ``DiskFullError`` if the disk is full.
        """
        event = _printable(event)
        if event["event"] == "release":
            self._releases[event["client"]] = event
        with filling(self.directory), self._metrics.open("a", encoding="utf-8") as lines:
            lines.write(json_text(event) + "\n")
        self._tracking.record(event)

    def keep_personalised(
        self, client: str, state: State | Path | None, round_number: int, size: int
    ) -> None:
        """Save a client's personalised adapter until ``checkpoint`` copies it to its final folder.

        ``adapters/clients`` contains only adapters of evaluated rounds: if the run ends before the
        evaluation and is resumed, the round may be repeated without this client.
        """
        self._sizes[client] = size
        if state is None:
            return
        self._rounds[client] = round_number
        self._save_adapter(
            folder=self._trained(round_number) / client,
            state=state,
            title="Personalised adapter",
            clients=1,
            rounds=round_number,
        )

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return the adapter last saved for a client, with the adapter's round, or None."""
        if client not in self._rounds:
            return None
        folder = self._trained(self._rounds[client]) / client
        if not folder.is_dir():
            folder = self.directory / "adapters" / "clients" / client
        if not folder.is_dir():
            return None  # it was deleted with a later round's unusable adapter
        return self._rounds[client], dict(load_file(folder / "adapter_model.safetensors"))

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Save a checkpoint, the current report, and the evaluated adapters.

        If the disk is full, raise ``DiskFullError``; the previous checkpoint remains.
        """
        rounds = progress.finished_rounds
        if progress.evaluated and rounds > 0:
            self._save_adapter(
                folder=self.directory / "adapters" / "global",
                state=state,
                title="Global adapter",
                clients=len(self._sizes),
                rounds=rounds,
                tokenizer=self._base,
            )
            self._published = rounds
        with filling(self.directory), self._metrics.open("ab") as metrics:
            # Events that the checkpoint refers to must survive a power failure.
            os.fsync(metrics.fileno())
            recorded = metrics.tell()
        checkpoint = RunCheckpoint(progress, state, self._sizes, self._rounds, recorded)
        save_checkpoint(self.directory, checkpoint, self._config.keep_rounds == "all")
        if progress.evaluated:
            self._publish(rounds)
        write_report(self.directory)

    def discard(self, round_number: int) -> None:
        """Delete a round's unusable adapters, and its checkpoint if there is an earlier one."""
        discard_checkpoint(self.directory, round_number)
        remove_whole(self._trained(round_number))
        if self._published == round_number:  # because the round had no evaluation
            remove_whole(self.directory / "adapters" / "global")
            for client in (name for name, last in self._rounds.items() if last == round_number):
                remove_whole(self.directory / "adapters" / "clients" / client)

    def _save_adapter(
        self,
        folder: Path,
        state: State | Path,
        title: str,
        clients: int,
        rounds: int,
        tokenizer: Path | None = None,
    ) -> None:
        card = model_card(
            title=title,
            base=self._config.model.name,
            directory=self._base,
            clients=clients,
            rounds=rounds,
            kind=self._config.adapter.kind,
            config=self._config.changed(),
            lineage=self._lineage,
            releases=[self._releases[name] for name in sorted(self._releases)],
        )
        save_adapter(folder, state, self._peft_config, card, tokenizer)

    def _trained(self, round_number: int) -> Path:
        """Return the folder for a round's personalised adapters until the round is evaluated."""
        return self.directory / ".trained" / str(round_number)

    def _publish(self, finished_rounds: int) -> None:
        """Copy a round's personalised adapters to ``adapters/clients``, and delete all others."""
        trained = self._trained(finished_rounds)
        for folder in sorted(trained.glob("*")):
            with replacing(self.directory / "adapters" / "clients" / folder.name) as aside:
                shutil.copytree(folder, aside)
        remove_whole(trained.parent)

    def rewind_to(self, checkpoint: RunCheckpoint) -> None:
        """Delete data written after a checkpoint; the resumed run writes it again.

        Trackers keep repeated rounds twice.
        """
        remove_unfinished(self.directory)
        for folder in self._trained(checkpoint.progress.finished_rounds).glob("*"):
            if checkpoint.rounds.get(folder.name) != checkpoint.progress.finished_rounds:
                remove_whole(folder)  # from a late reply that isn't in the checkpoint's average
        if checkpoint.progress.evaluated:
            self._published = checkpoint.progress.finished_rounds
            self._publish(self._published)
        self._sizes, self._rounds = dict(checkpoint.sizes), dict(checkpoint.rounds)
        with self._metrics.open("a+b") as metrics:
            metrics.seek(0)
            events = metrics.read(checkpoint.metrics_bytes)
            if len(events) < checkpoint.metrics_bytes:
                text = "%s is older than the checkpoint: the report will lack the last events"
                log(WARNING, text, self._metrics)
                events = events[: events.rfind(b"\n") + 1]
            metrics.truncate(len(events))
        recorded = read_events(self._metrics)
        for event in recorded:
            if event["event"] == "release":
                self._releases[event["client"]] = event
        self._tracking.resume(recorded)

    def close(self) -> None:
        """End the trackers."""
        self._tracking.close()


def _printable(value: Any) -> Any:
    """Return a JSON value with all texts made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def new_directory(config: RunConfig) -> Path:
    """Create a new folder for a run, named after the time and the strategy.

    Raise ``ConfigError`` if ``output-dir`` can't be written to.
    """
    parent = results_folder(config.output_dir)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{config.strategy}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            directory = parent / (name if number == 1 else f"{name}_{number}")
            with suppress(FileExistsError):
                directory.mkdir()
                return directory
    except OSError as error:
        raise ConfigError(f'output-dir = "{parent}" can\'t be written to: {error}') from error
    raise ConfigError(f'output-dir = "{parent}" has too many runs from this second; try again')
