"""The processes whose memory ``bench.memory`` measures, and what it is compared with."""

import gc
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.split_job import LIFETIME, SEED, Job, load_body, load_ends, open_lane, serving
from finetuning.settings import SplitSettings
from finetuning.training.loop import train_round
from split.client.split_model import SplitModel
from split.protocol.invitation import Invitation


class Memory:
    """The process's resident memory from now on."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        self._baseline = _status("VmRSS")

    def peak(self) -> int:
        """Give by how many bytes it had grown when it was largest."""
        return _status("VmHWM") - self._baseline


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Give the memory of tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class SavedTensors:
    """Counts what autograd keeps for backward passes.

    Args:
        parameters: which don't count.

    Attributes:
        peak: bytes that were kept at once.

    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: Counter[int] = Counter()
        self._bytes = self.peak = 0

    def counting(self) -> saved_tensors_hooks:
        """Count what is saved in forward passes in the ``with`` block."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            if not self._users[storage.data_ptr()]:
                self._bytes += storage.nbytes()
                self.peak = max(self.peak, self._bytes)
            self._users[storage.data_ptr()] += 1
        return _Saved(tensor, self)

    def forget(self, tensor: torch.Tensor) -> None:
        """Take note that a saved tensor isn't kept any more."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._users[storage.data_ptr()] -= 1
            if not self._users[storage.data_ptr()]:
                self._bytes -= storage.nbytes()


@dataclass
class _Saved:
    """A saved tensor; autograd drops it when its backward pass is done."""

    tensor: torch.Tensor
    owner: SavedTensors

    def __del__(self) -> None:
        self.owner.forget(self.tensor)


@dataclass(frozen=True)
class ClientMemory:
    """Bytes of a client.

    Attributes:
        layers: its own.
        activations: saved for backward passes at once.
        loading: the peak after loading.
        peak: after training.

    """

    layers: int
    activations: int
    loading: int
    peak: int


@dataclass(frozen=True)
class ServerMemory:
    """Bytes of a server.

    Attributes:
        layers: the frozen ones.
        loading: the peak after loading.
        peak: after training.

    """

    layers: int
    loading: int
    peak: int


def measure_client(link: Connection, job: Job, split: SplitSettings, miniature: Job) -> None:
    """Load and train; the messages are two invitations, the answer is a ``ClientMemory``."""
    _train_ends(link.recv(), miniature, split)
    memory = Memory()
    ends = load_ends(job, split)
    loading = memory.peak()
    tensors = [p for part in ends.values() for p in part.model.parameters()]
    buffers = [b for part in ends.values() for b in part.model.buffers()]
    model, _ = open_lane(ends, link.recv(), job, split)
    _train(model, job, slice(None, -1))
    peak = memory.peak()
    saved = SavedTensors(tensors)
    with saved.counting():
        _train(model, job, slice(-1, None))
    model.end()
    link.send(ClientMemory(bytes_of(tensors + buffers), saved.peak, loading, peak))


def measure_server(
    link: Connection, job: Job, split: SplitSettings, clients: Sequence[str], miniature: Job
) -> None:
    """Give invitations for a miniature and then for the job; last a ``ServerMemory``."""
    _serve_all(link, miniature, split, clients)
    memory = Memory()
    layers, loading = _serve_all(link, job, split, clients, memory)
    link.send(ServerMemory(layers, loading, memory.peak()))


def _serve_all(
    link: Connection,
    job: Job,
    split: SplitSettings,
    clients: Sequence[str],
    memory: Memory | None = None,
) -> tuple[int, int]:
    body = load_body(job, split)
    loading = memory.peak() if memory is not None else 0
    layers = bytes_of([*body.model.parameters(), *body.model.buffers()])
    with serving(body, job, split, clients) as server:
        link.send([server.invite_to_train(client, 1, SEED, LIFETIME) for client in clients])
        link.recv()
        errors = [account.error for account in server.finish_lanes() if account.error]
    if errors:
        raise RuntimeError(errors[0])
    return layers, loading


def run_clients(link: Connection, job: Job, split: SplitSettings) -> None:
    """Train a client per invitation, each in a thread; a message has all invitations of a round."""
    invitations = link.recv()
    errors: list[BaseException] = []

    def work(invitation: Invitation) -> None:
        try:
            _train_ends(invitation, job, split)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in invitations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    link.send("done")


def _train_ends(invitation: Invitation, job: Job, split: SplitSettings) -> None:
    model, _ = open_lane(load_ends(job, split), invitation, job, split)
    _train(model, job, slice(None))
    model.end()


def _train(model: SplitModel, job: Job, chosen: slice) -> None:
    place = job.place()
    place = replace(place, steps=place.steps[chosen])
    train_round(model, model.parameters, job.examples(job), 0, place, job.train)
