"""An unfinished round on a client's disk, from which the round continues if it is repeated.

A round is repeated if the whole run failed and is resumed. It continues only if all its inputs are
the same.

A private round draws its rows and its noise from a secret key. If the client's process is killed,
the repeated round continues with the same key, without another ε. It then reveals no more than the
recorded ε, because it is the same computation, of which only one result is sent:

- The key is used only with the same inputs: global adapter, rows, settings, policy, code. A step
  that is repeated has the same rows and the same noise, whatever ended the process.
- The key is used only after ε has been recorded in the account and then in the audit log.
- The key is used by one process at a time, which holds a lock until it has removed the key.
- The key isn't used after an adapter was sent. The audit log, which records the adapter before it
  leaves, proves this even if the key returns with a backup of the state or after a power failure.

The key is as confidential as the rows: with it, the noise could be subtracted from the adapter.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from logging import INFO, WARNING

import torch
from filelock import FileLock, Timeout
from flwr.common import log
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file

from client_app.code_digest import code_digest
from client_app.state import PrivateRound
from client_app.task import ClientTask
from federation.site_policy import PolicyError
from finetuning.adapters.adapter import State
from finetuning.files import remove_whole, replacing, write_json, write_secret
from finetuning.training.loop import TrainingReport
from finetuning.training.optimization import OptimizerState, export_optimizer


class UnfinishedRound:
    """Stores a round's progress every ``train.checkpoint-minutes``; 0 disables this."""

    def __init__(self, task: ClientTask, draw: str = "") -> None:
        self._task, self._draw = task, draw  # ``draw`` identifies a private round's random numbers
        self._folder = task.state.directory / "unfinished"
        self._seconds = 60 * task.config.train.checkpoint_minutes
        self._saved = time.monotonic()

    def load(self) -> tuple[TrainingReport, State, OptimizerState] | None:
        """Return the report, adapter and optimizer state, or None if there is no such round."""
        try:
            content = dict(json.loads((self._folder / "progress.json").read_bytes()))
            if content.pop("inputs", None) != self._inputs:
                return None
            report = TrainingReport(**content)
            adapter = load_file(self._folder / "adapter.safetensors")
            optimizer = load_file(self._folder / "optimizer.safetensors")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            log(WARNING, "%s: the checkpoint can't be read: %s", self._task.title, error)
            return None
        log(INFO, "%s: continuing after step %d", self._task.title, len(report.losses))
        return report, adapter, optimizer

    def save_if_due(
        self,
        report: TrainingReport,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Store the progress after a step, if enough time has passed since the last time.

        An error, such as a full disk, is only logged.
        """
        if not self._seconds or time.monotonic() < self._saved + self._seconds:
            return
        adapter = {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
        try:
            with replacing(self._folder) as aside:
                aside.mkdir(parents=True)
                save_file(adapter, aside / "adapter.safetensors")
                save_file(export_optimizer(optimizer, parameters), aside / "optimizer.safetensors")
                content = {"inputs": self._inputs, **asdict(report)}
                write_json(aside / "progress.json", content)
        except (OSError, SafetensorError) as error:
            log(WARNING, "%s: the checkpoint can't be written: %s", self._task.title, error)
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Remove the stored progress after the end of the round."""
        remove_whole(self._folder)

    @cached_property
    def _inputs(self) -> str:
        return inputs_of(self._task) + self._draw


def inputs_of(task: ClientTask) -> str:
    """Return a digest of all that determines a round's result, except a private round's key."""
    config, privacy = task.config, task.site.privacy
    lengths = [len(example.tokens) for example in task.institution.train]
    settings = [
        code_digest(),
        *(version(package) for package in ("torch", "transformers", "peft")),
        str((task.institution.size, lengths, privacy and privacy.model_dump_json())),
        str((config.strategy, config.seed, config.rounds, task.instruction.round)),
        config.train.model_dump_json(exclude={"checkpoint_minutes"}),
        *(s.model_dump_json() for s in (config.model, config.adapter, config.continual)),
        config.fedprox.model_dump_json(),
        task.instruction.base,
    ]
    inputs = hashlib.sha256(json.dumps(settings).encode())
    for name in sorted(task.arrays):
        inputs.update(name.encode() + save(task.arrays[name]))
    for example in task.institution.train:
        inputs.update(example.tokens.numpy().tobytes() + example.is_target.numpy().tobytes())
    return inputs.hexdigest()


@contextmanager
def private_round(task: ClientTask) -> Iterator[PrivateRound]:
    """Yield a new or continued private round; remove its key when the adapter is complete.

    Raise ``PolicyError`` if another process trains a private round of the same run.
    """
    file, inputs = task.state.private_round_file, inputs_of(task)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(f"{file}.lock", mode=0o600).acquire(timeout=0)
    except Timeout as error:
        raise PolicyError(
            "another process trains a private round of this run; repeat the round when it has ended"
        ) from error
    with lock:
        begun = task.state.private_round()
        if begun is None or begun.inputs != inputs or not task.site.has_spent(begun.id):
            begun = PrivateRound(inputs, task.instruction.round)
            write_secret(file, json.dumps(asdict(begun)).encode())
        yield begun
        file.unlink()
