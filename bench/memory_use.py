"""Memory use of a process: resident memory, tensors, and tensors saved by autograd."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks


class Memory:
    """The growth of the process's resident memory since the construction of this object."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._baseline = _status("VmRSS")

    def peak(self) -> int:
        """Return the largest growth so far, in bytes."""
        return _status("VmHWM") - self._baseline


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors in bytes; each storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class SavedTensors:
    """Count the tensors that autograd saves for backward passes, except the model's parameters.

    ``peak`` is the maximum number of bytes saved at once.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: Counter[int] = Counter()
        self._bytes = self.peak = 0

    def counting(self) -> saved_tensors_hooks:
        """Count the tensors saved by forward passes in the ``with`` block."""
        return saved_tensors_hooks(self._pack, lambda saved: saved())

    def _pack(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def saved() -> torch.Tensor:
            return tensor

        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._parameters:
            self._count(place, size, 1)
            # Autograd releases ``saved`` after the backward pass.
            weakref.finalize(saved, self._count, place, size, -1)
        return saved

    def _count(self, place: int, size: int, users: int) -> None:
        before = bool(self._users[place])
        self._users[place] += users
        self._bytes += size * (bool(self._users[place]) - before)
        self.peak = max(self.peak, self._bytes)
