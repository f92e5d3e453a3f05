"""The memory that split learning needs, at a client and at the server: ``python -m bench.memory``.

*Client.* A fresh process loads head and tail of a large random checkpoint and trains over a lane;
the server is another process. Its peak, loading included, is compared with

- its own layers: all tensors of head and tail, each storage once, adapters among them;
- activations: what autograd keeps for backward passes at once, over all micro-batches in flight.
  Every tensor saved for a backward pass is counted from its forward pass until autograd releases
  it; a storage that several of them share counts once, and parameters do not count. This is the
  peak over one step, taken after the measurement of memory;
- one part of a micro-batch's logits (256 targets × vocabulary, float32), which the backward pass of
  the loss needs for their gradient in addition to the saved tensors.

The rest raises the ratio: gradients and Adam's moments, frames in transit, gRPC, and memory that
the allocator does not return.

*Server.* The same ``split.activation_budget`` for one hierarchical lane and for eight, each in a
fresh process; the clients are threads of another. It has room for two micro-batches, which one lane
of window 4 fills; with room for four, one lane would rarely have so many between their passes.

glibc 2.36 never puts an aligned block, as all of torch's are, into a hole of exactly its size, so
that tensors of up to 32 MiB leave its heap nearly half empty, and each thread that once allocated
memory keeps some of it. ``--mapped`` makes it map every block of 1 MiB or more separately and use
two heaps for all threads. This excludes what the allocator keeps, and costs about a third of the
speed.

A process's memory is the growth of its resident memory: VmHWM, reset after it has imported
everything and has run the measurement once with a miniature, minus VmRSS at that time.
"""

import argparse
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from rich.table import Table

from bench.harness import Worker, make_table, show
from bench.job import LIFETIME, Job, join, load_body, load_ends, open_model, random_job, serving
from bench.memory_use import Memory, SavedTensors, bytes_of
from bench.parties import serve_clients, train_clients
from bench.shape import Shape
from finetuning.training.loop import train_round
from split.client.split_model import SplitModel
from split.protocol.invitation import Invitation
from split.settings import SplitSettings

_MINIATURE = Shape(hidden=64, blocks=3, vocabulary=64, rows=1, columns=8, micro_batches=1)
_LANES = 8
_ROOM = 2  # micro-batches within the activation budget
_STEPS = 2
_TARGETS_AT_ONCE = 256  # as in finetuning.model.output_head
_MEGABYTE = 1e6


@dataclass(frozen=True)
class ClientMemory:
    """Bytes of a client.

    Attributes:
        layers: Bytes of head and tail.
        activations: Largest number of bytes saved for backward passes at once.
        loading: Peak after loading.
        peak: Peak after training.

    """

    layers: int
    activations: int
    loading: int
    peak: int


@dataclass(frozen=True)
class ServerMemory:
    """Bytes of a server.

    Attributes:
        layers: Bytes of the frozen blocks.
        loading: Peak after loading.
        peak: Peak after training.

    """

    layers: int
    loading: int
    peak: int


def measure_client(link: Connection, job: Job, split: SplitSettings, miniature: Job) -> None:
    """Load and train; the messages are two invitations, the answer is a ``ClientMemory``."""
    _train_once(link.recv(), miniature, split)
    memory = Memory()
    ends = load_ends(job, split)
    loading = memory.peak()
    tensors = [p for part in ends.values() for p in part.model.parameters()]
    buffers = [b for part in ends.values() for b in part.model.buffers()]
    model = open_model(ends=ends, invitation=link.recv(), job=job, split=split)
    join(model, job)
    _train(model, job, slice(None, -1))
    peak = memory.peak()
    saved = SavedTensors(tensors)
    with saved.counting():
        _train(model, job, slice(-1, None))
    model.end()
    link.send(
        ClientMemory(
            layers=bytes_of(tensors + buffers), activations=saved.peak, loading=loading, peak=peak
        )
    )


def _train_once(invitation: Invitation, job: Job, split: SplitSettings) -> None:
    model = open_model(ends=load_ends(job, split), invitation=invitation, job=job, split=split)
    join(model, job)
    _train(model, job, slice(None))
    model.end()


def _train(model: SplitModel, job: Job, chosen: slice) -> None:
    local_round = job.local_round()
    local_round = replace(local_round, steps=local_round.steps[chosen])
    train_round(
        model=model,
        parameters=model.parameters,
        examples=job.examples(job),
        padding=0,
        local_round=local_round,
        settings=job.train,
    )


def measure_server(
    link: Connection, job: Job, split: SplitSettings, lanes: int, miniature: Job
) -> None:
    """Serve the miniature and then the job; the last message is a ``ServerMemory``.

    The messages before it are the clients' invitations; the answer to each is that all are done.
    """
    _serve(link=link, job=miniature, split=split, lanes=lanes)
    memory = Memory()
    layers, loading = _serve(link=link, job=job, split=split, lanes=lanes, memory=memory)
    link.send(ServerMemory(layers, loading, memory.peak()))


def _serve(
    link: Connection, job: Job, split: SplitSettings, lanes: int, memory: Memory | None = None
) -> tuple[int, int]:
    """Serve one round, and return the bytes of the layers and the peak of loading."""
    body = load_body(job, split)
    loading = memory.peak() if memory is not None else 0
    layers = bytes_of([*body.model.parameters(), *body.model.buffers()])
    names = [f"client-{number}" for number in range(lanes)]
    with serving(body=body, job=job, split=split, clients=lanes) as server:
        server.begin_round(dict.fromkeys(names, 1), job.seed)
        link.send(
            [
                server.invite_to_train(
                    client=name, round_number=1, seed=job.seed, lifetime=LIFETIME
                )
                for name in names
            ]
        )
        link.recv()
        errors = [account.error for account in server.finish_lanes() if account.error]
    if errors:
        raise RuntimeError(errors[0])
    return layers, loading


def client_memory(job: Job, miniature: Job, cores: set[int]) -> Table:
    """Run a client and the servers that it needs."""
    split = SplitSettings(frame_timeout=600.0)
    with ExitStack() as stack:
        client = stack.enter_context(Worker(measure_client, cores, job, split, miniature))
        for each in (miniature, job):
            server = stack.enter_context(Worker(serve_clients, cores, [each], split))
            client.send(server.receive()[0])
        memory: ClientMemory = client.receive()
    logits = _TARGETS_AT_ONCE * job.shape.vocabulary * 4
    needed = memory.layers + memory.activations + logits
    table = make_table(f"a client of {job.shape}, window 4", "", "MB", "ratio", "target")
    for name, value, against, target in (
        ("own layers", memory.layers, None, ""),
        ("activations", memory.activations, None, ""),
        ("a part of the logits", logits, None, ""),
        ("peak of loading ÷ own layers", memory.loading, memory.layers, ""),
        ("peak ÷ (layers + activations + logits)", memory.peak, needed, "≤ 1.15"),
    ):
        ratio = f"{value / against:.3f}" if against else ""
        table.add_row(name, f"{value / _MEGABYTE:.1f}", ratio, target)
    return table


def server_memory(job: Job, miniature: Job, cores: set[int]) -> Table:
    """Run a server for one lane and another for many, and their clients in other processes."""
    budget = _ROOM * job.shape.tokens
    split = SplitSettings(schedule="hierarchical", activation_budget=budget, frame_timeout=600.0)
    headings = ("lanes", "frozen layers", "peak of loading", "peak", "÷ 1 lane", "target")
    table = make_table(f"the server of {job.shape}, activation-budget {budget}; MB", *headings)
    peak_of_one = 0
    for lanes, target in ((1, ""), (_LANES, "≤ 1.10")):
        with Worker(measure_server, cores, job, split, lanes, miniature) as server:
            for each in (miniature, job):
                with Worker(train_clients, cores, [each] * lanes, split) as clients:
                    for message in (server.receive(), each.steps, "accounts"):
                        clients.ask(message)
                server.send("done")
            memory: ServerMemory = server.receive()
        peak_of_one = peak_of_one or memory.peak
        values = (memory.layers, memory.loading, memory.peak)
        ratio = f"{memory.peak / peak_of_one:.3f}"
        table.add_row(str(lanes), *(f"{v / _MEGABYTE:.1f}" for v in values), ratio, target)
    return table


def main() -> None:
    """Measure a client, and the server with one lane and with many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["client", "server"], help="measure one of them")
    parser.add_argument("--mapped", action="store_true", help="map large blocks separately")
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    if arguments.mapped:  # inherited by the processes
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "2"}
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "dynamic")
    show(f"{os.confstr('CS_GNU_LIBC_VERSION')}, threshold of mapping: {threshold}")
    cores = os.sched_getaffinity(0)
    client = Shape(hidden=arguments.hidden, blocks=12)
    server = Shape(hidden=arguments.hidden, blocks=8, vocabulary=1000, micro_batches=2)
    with random_job(_MINIATURE, _STEPS) as miniature:
        if arguments.only != "server":
            with random_job(client, _STEPS) as job:
                show(client_memory(job, miniature, cores))
        if arguments.only != "client":
            with random_job(server, _STEPS) as job:
                show(server_memory(job, miniature, cores))


if __name__ == "__main__":
    main()
