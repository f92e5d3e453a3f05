"""Valid replies of one phase, with arrays on disk to bound the memory."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from federation.answers import Answer
from federation.messages import State, from_arrays
from finetuning.files import filling


class Replies:
    """Context manager for valid replies; their arrays are files that are deleted on exit.

    Args:
        folder: Folder for the arrays; a folder left by a killed run is deleted first.

    Attributes:
        metrics: Metrics of valid replies, by client.
        answers: Answers sent as text, by client.
        left_out: Reasons for leaving out other clients, by client.
        withheld: Reasons of clients whose policies withhold metrics, by client.
        not_finite: Clients that reported a loss or gradient that isn't finite.

    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.metrics: dict[str, Mapping[str, Any]] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.left_out: dict[str, str] = {}
        self.withheld: dict[str, str] = {}
        self.not_finite: list[str] = []

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """Metrics of the clients that don't withhold metrics."""
        return [metrics for name, metrics in self.metrics.items() if name not in self.withheld]

    def add(self, name: str, metrics: Mapping[str, Any], arrays: ArrayRecord | None) -> None:
        """Add a client's valid reply, with checked arrays.

        Raises:
            DiskFullError: The arrays don't fit on the disk.

        """
        self.metrics[name] = dict(metrics)
        if arrays is not None:
            with filling(self._folder.parent):
                save_file(from_arrays(arrays), self.file(name), metadata={"format": "pt"})

    def leave_out(self, name: str, reason: str) -> None:
        """Leave out a client whose reply was already added."""
        del self.metrics[name]
        self.answers.pop(name, None)
        self.withheld.pop(name, None)
        self.left_out[name] = reason
        self.sort()

    def state(self, name: str) -> State:
        """Return a copy of a reply's arrays."""
        return dict(load_file(self.file(name)))

    def tensors(self) -> Iterator[tuple[str, State]]:
        """Yield the name and the values of all clients for one array at a time."""
        with ExitStack() as opened:
            files = {
                name: opened.enter_context(safe_open(self.file(name), framework="pt"))
                for name in self.metrics
            }
            for key in next(iter(files.values())).keys():  # noqa: SIM118
                yield key, {name: file.get_tensor(key) for name, file in files.items()}

    def file(self, name: str) -> Path:
        """Return the file with a reply's arrays; it may be moved after reading them."""
        return self._folder / f"{name}.safetensors"

    def sort(self) -> None:
        """Sort replies by name, so that sums don't depend on the order of arrival."""
        self.metrics = dict(sorted(self.metrics.items()))
        self.left_out = dict(sorted(self.left_out.items()))

    def __enter__(self) -> "Replies":
        shutil.rmtree(self._folder, ignore_errors=True)
        with filling(self._folder.parent):
            self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
