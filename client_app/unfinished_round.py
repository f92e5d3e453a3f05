"""An unfinished round on a client's disk, from which the round continues if it is repeated.

A round is repeated if a run is resumed after the client's process, or the coordinator's, was
killed. It continues only if all its inputs are the same.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from logging import INFO
from typing import Any

import torch
from flwr.common import log
from safetensors.torch import load_file, save, save_file

from client_app.task import Task
from finetuning.adapters.adapter import State
from finetuning.files import remove_whole, replacing, write_json
from finetuning.training.loop import RoundProgress
from finetuning.training.optimization import OptimizerState, export_optimizer


class UnfinishedRound:
    """Stores a round's progress every ``train.checkpoint-minutes``; 0 disables this.

    ``drawn`` contains the rows of each step if they can't be derived from the run's seed.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._folder = task.state.directory / "unfinished"
        self._seconds = 60 * task.config.train.checkpoint_minutes
        self._saved = time.monotonic()
        self._found = self._read()
        self.drawn: list[list[int]] | None = self._found.pop("drawn", None)

    def load(self) -> tuple[RoundProgress, State, OptimizerState] | None:
        """Return the round's progress, adapter and optimizer state, or None if it is new."""
        if not self._found:
            return None
        progress = RoundProgress(**self._found)
        log(INFO, "%s: continuing after step %d", self._task.title, len(progress.losses))
        adapter = load_file(self._folder / "adapter.safetensors")
        return progress, adapter, load_file(self._folder / "optimizer.safetensors")

    def save_if_due(
        self,
        progress: RoundProgress,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Store the progress after a step, if enough time has passed since the last time."""
        if self._seconds and time.monotonic() >= self._saved + self._seconds:
            adapter = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            self._write(progress, adapter, export_optimizer(optimizer, parameters))

    def begin(self, drawn: list[list[int]], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Store the drawn rows before the first step, so that they aren't drawn again."""
        self.drawn = drawn
        if self._seconds:
            adapter = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
            self._write(RoundProgress(), adapter, {})  # with privacy, optimizers start anew

    def remove(self) -> None:
        """Remove the stored progress after the end of the round."""
        remove_whole(self._folder)

    def _write(self, progress: RoundProgress, adapter: State, optimizer: OptimizerState) -> None:
        with replacing(self._folder) as aside:
            aside.mkdir(parents=True)
            save_file(adapter, aside / "adapter.safetensors")
            save_file(optimizer, aside / "optimizer.safetensors")
            content = {"inputs": self._inputs, "drawn": self.drawn, **asdict(progress)}
            write_json(aside / "progress.json", content)
        self._saved = time.monotonic()

    def _read(self) -> dict[str, Any]:
        file = self._folder / "progress.json"
        found: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
        return found if found.pop("inputs", None) == self._inputs else {}

    @cached_property
    def _inputs(self) -> str:
        """Digest of all that determines the round's result, except the random draws of privacy."""
        task, config = self._task, self._task.config
        settings: list[Any] = [config.strategy, task.instruction.round, config.rounds, config.seed]
        sections = (config.train, config.adapter, config.continual, config.fedprox)
        settings += [section.model_dump_json() for section in sections]
        settings.append(task.site.privacy.model_dump_json() if task.site.privacy else "")
        inputs = hashlib.sha256(json.dumps(settings).encode())
        for name in sorted(task.arrays):
            inputs.update(name.encode() + save(task.arrays[name]))
        for example in task.institution.train:
            inputs.update(example.tokens.numpy().tobytes() + example.is_target.numpy().tobytes())
        return inputs.hexdigest()
