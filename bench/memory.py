"""The memory that split learning needs, at a client and at the server: ``python -m bench.memory``.

*Client.* A fresh process loads the head and tail of a large random checkpoint and trains over a
lane. Its peak, including loading, is compared with the sum of its own layers (each storage once),
of the tensors saved by autograd for all micro-batches in flight, and of one chunk of a
micro-batch's logits.

*Server.* Fresh processes serve one lane and eight lanes, with the hierarchical schedule and an
activation budget for two micro-batches. The clients are threads of another process.

Everything is measured with glibc's allocator and, as `chambers` starts programs where it is
installed, tcmalloc.
"""

import gc
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from statistics import median

import torch
from torch.autograd.graph import saved_tensors_hooks

from bench.harness import BoundProcess, command, make_table, show
from bench.job import (
    Course,
    Shape,
    TrainingJob,
    join_round,
    load_client_parts,
    load_server_part,
    open_model,
    random_job,
)
from bench.parties import BenchServer, Training
from chambers.allocator import allocator_variables
from split.protocol.tickets import Invitation
from split.settings import SplitSettings

_CLIENT = Shape(hidden=1024, blocks=12)
_SERVER = Shape(hidden=1024, blocks=8, vocabulary=1000, micro_batches=2)
_MINIATURE = Shape(hidden=64, blocks=3, vocabulary=64, rows=1, columns=8, micro_batches=1)
_LANES = 8
_ROOM = 2  # number of micro-batches within the activation budget
_STEPS = 4
_TARGETS_AT_ONCE = 256  # number of targets in a micro-batch; their logits are one chunk
_TURNS = 5  # of a client, with each allocator


class Memory:
    """The growth of the process's resident memory since the construction of this object."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._baseline = status_bytes("VmRSS")

    def peak(self) -> int:
        """Return the largest growth so far, in bytes."""
        return status_bytes("VmHWM") - self._baseline


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return an amount of memory in the status of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
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


def measure_client(
    split: SplitSettings, job: TrainingJob, invitation: Invitation
) -> dict[str, float]:
    """Train a client; return byte counts by name, and the CPU seconds of a step."""
    memory = Memory()
    ends = load_client_parts(job, split)
    loading = memory.peak()
    tensors = [p for part in ends.values() for p in part.model.parameters()]
    buffers = [b for part in ends.values() for b in part.model.buffers()]
    with open_model(ends, invitation, job, split) as model:
        join_round(model, job)
        course = Course(job, model, model.parameters)
        course.train(1)  # the first step is slower
        began = time.process_time()
        course.train(job.steps - 2)
        cpu = (time.process_time() - began) / (job.steps - 2)
        peak = memory.peak()
        saved = SavedTensors(tensors)
        with saved.counting():
            course.train(1)
        model.end()
    layers = bytes_of(tensors + buffers)
    sizes = {"layers": layers, "activations": saved.peak, "loading": loading, "peak": peak}
    return sizes | {"cpu": cpu}


class MeasuredServer:
    """A block server that measures its own memory, in a separate process."""

    def invite(self, jobs: Sequence[TrainingJob], split: SplitSettings) -> list[Invitation]:
        """Begin to serve, and return the invitations."""
        self._memory = Memory()
        body = load_server_part(jobs[0], split)
        layers = bytes_of([*body.model.parameters(), *body.model.buffers()])
        self._bytes = {"loading": self._memory.peak(), "layers": layers}
        self._server = BenchServer(jobs, split, body)
        return self._server.invite()

    def finish(self) -> dict[str, int]:
        """End the round, and return byte counts by name; exit if a lane failed."""
        self._server.finish()
        del self._server
        return self._bytes | {"peak": self._memory.peak()}


def client_memory(job: TrainingJob, miniature: TrainingJob, cores: set[int]) -> dict[str, float]:
    """Run a client and the servers that it needs; return what ``measure_client`` returns."""
    split = SplitSettings(frame_timeout=600.0)
    with BoundProcess(cores, copy, split) as client:
        for each in (miniature, job):
            with BoundProcess(cores, BenchServer, [each], split) as server:
                (invitation,) = server.ask(BenchServer.invite)
                measured = client.ask(measure_client, each, invitation)
    return measured


def server_memory(
    job: TrainingJob, miniature: TrainingJob, cores: set[int], lanes: int
) -> dict[str, int]:
    """Run a server, and its clients in another process; return the server's byte counts by name."""
    split = SplitSettings(
        schedule="hierarchical", activation_budget=_ROOM * job.shape.tokens, frame_timeout=600.0
    )
    with BoundProcess(cores, MeasuredServer) as server:
        for each in (miniature, job):
            jobs = [each] * lanes
            with BoundProcess(cores, Training, jobs, split) as clients:
                clients.ask(Training.begin, server.ask(MeasuredServer.invite, jobs, split))
                clients.ask(Training.steps, each.steps)
                clients.ask(Training.finish)
            measured = server.ask(MeasuredServer.finish)
    return measured


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which new processes inherit, and remove them again."""
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def main() -> None:
    """Measure a client, and the server with one lane and with eight, for both allocators."""
    command(__doc__).parse_args()
    cores = os.sched_getaffinity(0)
    allocators = {"glibc": {}, "tcmalloc": allocator_variables()}
    if not allocators["tcmalloc"]:
        sys.exit("tcmalloc isn't installed (Debian: libtcmalloc-minimal4), or LD_PRELOAD is set")
    clients = make_table(
        *("", "own layers", "activations", "a part of the logits", "peak of loading", "peak"),
        *("loading ÷ layers", "peak ÷ (layers + activations + logits)", "CPU s of a step"),
    )
    servers = make_table("", "lanes", "frozen layers", "peak of loading", "peak", "÷ 1 lane")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in allocators}
    with ExitStack() as stack:
        miniature, client, server = (
            stack.enter_context(random_job(shape, _STEPS))
            for shape in (_MINIATURE, _CLIENT, _SERVER)
        )
        for _ in range(_TURNS):
            for name, variables in allocators.items():
                with _environment(variables):
                    measured[name].append(client_memory(client, miniature, cores))
        for name, turns in measured.items():
            own = {key: median(turn[key] for turn in turns) for key in turns[0]}
            needed = {key: own[key] for key in ("layers", "activations")}
            needed["logits"] = _TARGETS_AT_ONCE * _CLIENT.vocabulary * 4
            sizes = [*needed.values(), own["loading"], own["peak"]]
            ratios = own["loading"] / own["layers"], own["peak"] / sum(needed.values())
            cells = [f"{size / 1e6:.1f}" for size in sizes] + [f"{ratio:.3f}" for ratio in ratios]
            clients.add_row(name, *cells, f"{own['cpu']:.2f}")
        for name, variables in allocators.items():
            with _environment(variables):
                both = {n: server_memory(server, miniature, cores, n) for n in (1, _LANES)}
            for lanes, sizes_of in both.items():
                cells = [f"{sizes_of[key] / 1e6:.1f}" for key in ("layers", "loading", "peak")]
                ratio = sizes_of["peak"] / both[1]["peak"]
                servers.add_row(name, str(lanes), *cells, f"{ratio:.3f}")
    show(
        f"{os.confstr('CS_GNU_LIBC_VERSION')}",
        f"a client of {_CLIENT}, window 4; MB, medians of {_TURNS}",
        clients,
        f"the server of {_SERVER}, activation-budget {_ROOM * _SERVER.tokens}; MB",
        servers,
    )


if __name__ == "__main__":
    main()
