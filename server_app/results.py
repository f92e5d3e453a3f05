"""A run's folder of results: adapters, metrics, checkpoints and report."""

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log
from safetensors.torch import load_file

from federation.run_config import ConfigError, RunConfig
from federation.run_folder import METRICS, results_folder, write_status
from federation.status import RunStatus
from finetuning.adapters.adapter import State, save_adapter
from finetuning.adapters.model_card import model_card
from finetuning.files import filling, remove_unfinished, remove_whole, replacing, write_json
from finetuning.model.gguf_file import origin_of
from server_app.checkpoint import Checkpoint, discard_checkpoint, save_checkpoint
from server_app.report import write_report
from server_app.tensorboard_file import TensorBoardFile
from split.protocol.errors import printable
from strategies.journal import Progress

# Folder of personalised adapters of a round whose global adapter has not been evaluated yet.
_TRAINED = ".trained"
_PACKAGES = ("flwr", "torch", "transformers", "peft", "bitsandbytes", "tokenizers", "safetensors")


class Results:
    """Writes a run's results; the strategy's ``Journal``.

    Args:
        directory: Folder of the run, created by ``new_directory`` or by the run that is resumed.
        config: The run's configuration.
        base: Id or directory of the base model.
        peft_config: PEFT's configuration of the adapters.

    """

    def __init__(self, directory: Path, config: RunConfig, base: str, peft_config: Any) -> None:
        self.directory = directory
        self._config = config
        self._base = base
        self._peft_config = peft_config
        self._sizes: dict[str, int] = {}
        self._rounds: dict[str, int] = {}
        self._global_round = 0  # whose global adapter has been saved
        self._metrics = directory / METRICS
        with filling(directory):
            self._tensorboard = TensorBoardFile(directory / "tensorboard")

    def describe(self, fingerprint: Mapping[str, str]) -> None:
        """Write the resolved config, the versions and the base model's fingerprint."""
        origin = origin_of(Path(self._base))
        base = {"loaded from": self._base} | ({"gguf": asdict(origin)} if origin else {})
        versions = {"python": platform.python_version()} | {p: version(p) for p in _PACKAGES}
        write_json(self.directory / "config.json", self._config.flat())
        write_json(self.directory / "versions.json", versions)
        write_json(self.directory / "base-model.json", {**base, "digests": dict(fingerprint)})

    @property
    def scratch(self) -> Path:
        """Folder for files that are deleted when a round ends, on the same disk as the results."""
        return self.directory / ".replies"

    def show(self, status: RunStatus) -> None:
        """Replace ``status.json``; a disk that is full for a while doesn't end the run."""
        try:
            write_status(self.directory, status)
        except OSError as error:
            log(WARNING, "The run's status can't be written: %s", error)

    def record(self, event: Mapping[str, Any]) -> None:
        """Append an event to ``metrics.jsonl`` and its numbers to TensorBoard.

        Texts are escaped and shortened, since some come from peers and must not end the run.

        Raises:
            DiskFullError: It doesn't fit on the disk.

        """
        event = _printable(event)
        with filling(self.directory):
            with self._metrics.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(event, ensure_ascii=False) + "\n")
            self._plot(event)

    def _plot(self, event: Mapping[str, Any]) -> None:
        if event["event"] not in {"train", "evaluate"}:
            return
        prefix = "/".join(str(event[k]) for k in ("client", "event", "model") if k in event)
        values = {
            f"{prefix}/{key}": float(value)
            for key, value in event.items()
            if isinstance(value, int | float) and key != "round"
        }
        self._tensorboard.add(event["round"], values)

    def keep_personalised(
        self, client: str, state: State, round_number: int, size: int, file: Path | None = None
    ) -> None:
        """Save a client's personalised adapter; ``checkpoint`` copies it to ``adapters/clients``.

        So the adapters there are always those of an evaluated checkpoint's rounds: if the run ends
        before that and is resumed, the round may be repeated, perhaps without this client.
        """
        self._sizes[client], self._rounds[client] = size, round_number
        title = f"Personalised adapter of {client}"
        self._save_adapter(
            folder=self._trained(round_number) / client,
            state=state if file is None else file,
            title=title,
            sizes={client: size},
            rounds=round_number,
        )

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return the round and the adapter of a client that were saved last, or None."""
        if client not in self._rounds:
            return None
        folder = self._trained(self._rounds[client]) / client
        if not folder.is_dir():
            folder = self._clients / client
        return self._rounds[client], dict(load_file(folder / "adapter_model.safetensors"))

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Save a checkpoint to resume from, the report so far, and adapters that were evaluated.

        Raises:
            DiskFullError: They don't fit on the disk; the checkpoint before is kept.

        """
        rounds = progress.finished_rounds
        if progress.evaluated and rounds > self._global_round:
            self._save_adapter(
                folder=self.directory / "adapters" / "global",
                state=state,
                title="Global adapter",
                sizes=self._sizes,
                rounds=rounds,
            )
            self._global_round = rounds
        with filling(self.directory), self._metrics.open("ab") as metrics:
            # A power failure must not take events of which the checkpoint says that they are there.
            os.fsync(metrics.fileno())
            recorded = metrics.tell()
        checkpoint = Checkpoint(
            progress=progress,
            state=state,
            sizes=self._sizes,
            rounds=self._rounds,
            metrics_bytes=recorded,
        )
        save_checkpoint(self.directory, checkpoint)
        if progress.evaluated:
            self._publish(rounds)
        with filling(self.directory):
            self._tensorboard.flush()
        write_report(self.directory)

    def discard(self, round_number: int) -> None:
        """Drop a round's checkpoint, if there is an earlier one: its adapter is unusable."""
        discard_checkpoint(self.directory, round_number)
        remove_whole(self._trained(round_number))

    def _save_adapter(
        self, folder: Path, state: State | Path, title: str, sizes: Mapping[str, int], rounds: int
    ) -> None:
        card = model_card(
            title=title,
            base=self._config.model.name,
            directory=self._base,
            sizes=sizes,
            rounds=rounds,
            config=self._config.flat(),
        )
        save_adapter(directory=folder, state=state, config=self._peft_config, card=card)

    @property
    def _clients(self) -> Path:
        return self.directory / "adapters" / "clients"

    def _trained(self, round_number: int) -> Path:
        """Return the folder of a round's personalised adapters until it has been evaluated."""
        return self.directory / _TRAINED / str(round_number)

    def _publish(self, finished_rounds: int) -> None:
        """Copy the finished round's personalised adapters; drop those of one that broke off."""
        trained = self._trained(finished_rounds)
        for folder in sorted(trained.glob("*")):
            with replacing(self._clients / folder.name) as aside:
                shutil.copytree(folder, aside)
        remove_whole(trained.parent)

    def rewind_to(self, checkpoint: Checkpoint) -> None:
        """Drop what was written after a checkpoint: the resumed run writes it again.

        TensorBoard's files stay as they are: a round that is repeated is in them twice.
        """
        remove_unfinished(self.directory)
        if checkpoint.progress.evaluated:
            self._publish(checkpoint.progress.finished_rounds)
        self._sizes, self._rounds = dict(checkpoint.sizes), dict(checkpoint.rounds)
        with self._metrics.open("a+b") as metrics:
            metrics.seek(0)
            events = metrics.read(checkpoint.metrics_bytes)
            if len(events) < checkpoint.metrics_bytes:
                text = "%s is from before the checkpoint: the report will lack the last events"
                log(WARNING, text, self._metrics)
                events = events[: events.rfind(b"\n") + 1]
            metrics.truncate(len(events))

    def close(self) -> None:
        """Flush and close the files; a full disk changes nothing about how the run ends."""
        try:
            self._tensorboard.close()
        except OSError as error:
            log(WARNING, "TensorBoard's file can't be written: %s", error)


def _printable(value: Any) -> Any:
    """Return a JSON value in which all texts are printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


def new_directory(config: RunConfig) -> Path:
    """Create a new folder for a run, named by time and strategy.

    Raises:
        ConfigError: ``output-dir`` can't be written to.

    """
    parent = results_folder(config.output_dir)
    name = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{config.strategy}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            directory = parent / (name if number == 1 else f"{name}_{number}")
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(f'output-dir = "{parent}" can\'t be written to: {error}') from error
    raise ConfigError(f'output-dir = "{parent}" has a thousand runs from this second')
