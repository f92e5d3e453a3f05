"""What split learning takes of memory, at a client and at the server: ``python -m bench.memory``.

*Client.* A fresh process loads head and tail of a large random checkpoint and trains over a lane;
the server is another process. Its peak, loading included, is compared with

- its own layers: all tensors of head and tail, each storage once, adapters among them;
- activations: what autograd keeps for backward passes at once, over all micro-batches that are
  under way. Every tensor that is saved for a backward pass is followed from its forward pass until
  autograd gives it up; a storage that several of them share counts once, a parameter's doesn't.
  That is the peak over one step, measured after the memory's;
- one part of a micro-batch's logits (256 targets × vocabulary, float32), which the backward pass of
  the loss needs for their gradient beside what is saved.

Not in the denominator, and so in the ratio: gradients and Adam's moments, frames on their way,
gRPC, and what the allocator doesn't give back.

*Server.* The same ``split.activation_budget`` for one hierarchical lane and for eight, in a fresh
process each; the clients are threads of another. It has room for two micro-batches, which one lane
of window 4 fills; with room for four, one lane would rarely have so many between their passes.

glibc 2.36 never puts an aligned block, as all of torch's are, into a hole of exactly its size, so
that tensors of up to 32 MiB leave its heap nearly half empty, and each thread that once took memory
keeps some of it. ``--mapped`` lets it map every block of 1 MiB or more by itself and share two
heaps among all threads: that shows what is held without what the allocator keeps, and costs about a
third of the speed.

A process's memory is what it has resident (VmHWM, reset after it has imported everything and has
done all this once with a miniature), minus what it had then.
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.split_job import Job, Shape, random_examples
from bench.split_memory import (
    ClientMemory,
    ServerMemory,
    measure_client,
    measure_server,
    run_clients,
)
from bench.split_processes import Worker, serve
from finetuning.settings import AdapterSettings, SplitSettings, TrainSettings

_ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0, targets="q_proj,k_proj,v_proj")
_MINIATURE = Shape(hidden=64, blocks=3, vocabulary=64, rows=1, columns=8, micro_batches=1)
_CLIENT = Shape(hidden=1024, blocks=12)
_SERVER = Shape(hidden=1024, blocks=8, vocabulary=1000, micro_batches=2)
_LANES = 8
_ROOM = 2  # micro-batches within the activation budget
_STEPS = 2
_TARGETS_AT_ONCE = 256  # as in finetuning.whole_model
_MEGABYTE = 1e6


def print_client(console: Console, shape: Shape, memory: ClientMemory) -> None:
    """Print a client's memory and its ratios."""
    logits = _TARGETS_AT_ONCE * shape.vocabulary * 4
    needed = memory.layers + memory.activations + logits
    table = Table(title=f"a client of {shape}, window 4")
    for heading in ("", "MB", "ratio", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = (
        ("own layers", memory.layers, None, ""),
        ("activations", memory.activations, None, ""),
        ("a part of the logits", logits, None, ""),
        ("peak of loading ÷ own layers", memory.loading, memory.layers, ""),
        ("peak ÷ (layers + activations + logits)", memory.peak, needed, "≤ 1.15"),
    )
    for name, value, against, target in rows:
        ratio = f"{value / against:.3f}" if against else ""
        table.add_row(name, f"{value / _MEGABYTE:.1f}", ratio, target)
    console.print(table)


def print_server(
    console: Console, shape: Shape, budget: int, one: ServerMemory, all_of: ServerMemory
) -> None:
    """Print a server's memory with one lane and with many."""
    table = Table(title=f"the server of {shape}, activation-budget {budget}; MB")
    for heading in ("lanes", "frozen layers", "peak of loading", "peak", "÷ 1 lane", "target"):
        table.add_column(heading, justify="right")
    for lanes, memory, target in ((1, one, ""), (_LANES, all_of, "≤ 1.10")):
        values = (memory.layers, memory.loading, memory.peak)
        ratio = f"{memory.peak / one.peak:.3f}"
        table.add_row(str(lanes), *(f"{v / _MEGABYTE:.1f}" for v in values), ratio, target)
    console.print(table)


def client_memory(job: Job, miniature: Job, split: SplitSettings, cores: set[int]) -> ClientMemory:
    """Run a client and the servers that it needs."""
    with ExitStack() as stack:
        client = stack.enter_context(Worker(measure_client, cores, job, split, miniature))
        for each in (miniature, job):
            server = stack.enter_context(Worker(serve, cores, each, split))
            client.send(server.receive())
        memory = client.receive()
        assert isinstance(memory, ClientMemory)
        return memory


def server_memory(
    job: Job, miniature: Job, split: SplitSettings, lanes: int, cores: set[int]
) -> ServerMemory:
    """Run a server, and its clients in another process."""
    names = [f"client-{number}" for number in range(lanes)]
    with Worker(measure_server, cores, job, split, names, miniature) as server:
        for each in (miniature, job):
            with Worker(run_clients, cores, each, split) as clients:
                clients.ask(server.receive())
            server.send("done")
        memory = server.receive()
        assert isinstance(memory, ServerMemory)
        return memory


def _job(directory: Path, shape: Shape) -> Job:
    """Write a checkpoint, and give what is trained with it."""
    train = TrainSettings(batch_size=shape.rows, accumulation=shape.micro_batches)
    shape.save(directory)
    return Job(directory, shape, _STEPS, _ADAPTER, train, random_examples)


def main() -> None:
    """Measure a client, and the server with one lane and with many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["client", "server"], help="measure one of them")
    parser.add_argument("--mapped", action="store_true", help="map large blocks by themselves")
    arguments = parser.parse_args()
    only = arguments.only
    if arguments.mapped:
        # Which the processes inherit.
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "2"}
    console, cores = Console(width=120), os.sched_getaffinity(0)
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_", "moves")
    console.print(f"{os.confstr('CS_GNU_LIBC_VERSION')}, threshold of mapping: {threshold}")
    with tempfile.TemporaryDirectory() as directory:
        miniature = _job(Path(directory) / "miniature", _MINIATURE)
        if only != "server":
            job = _job(Path(directory) / "client", _CLIENT)
            split = SplitSettings(frame_timeout=600.0)
            print_client(console, _CLIENT, client_memory(job, miniature, split, cores))
        if only != "client":
            job = _job(Path(directory) / "server", _SERVER)
            budget = _ROOM * _SERVER.tokens
            split = SplitSettings(
                schedule="hierarchical", activation_budget=budget, frame_timeout=600.0
            )
            one, many = (
                server_memory(job, miniature, split, lanes, cores) for lanes in (1, _LANES)
            )
            print_server(console, _SERVER, budget, one, many)


if __name__ == "__main__":
    main()
