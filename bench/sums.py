"""Cost of masked sums for a client and the coordinator, beside adapters in float32.

    python -m bench.sums [--members 3 10 50] [--weights 8e6 40e6] [--pairs 5]

A client encodes and masks an adapter of 448 arrays, which the coordinator receives and adds. Beside
it, the client copies the same adapter into an ArrayRecord, and the coordinator adds it to an
average. The sides take turns; times are CPU seconds, in this process, with one thread.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bench.harness import command, make_table, show
from federation.messages import from_arrays, to_arrays
from federation.sums.masks import Arrays, Masks, encode_update, sum_arrays
from finetuning.adapters.adapter import State
from finetuning.aggregation.weighted_mean import WeightedMean

_ARRAYS = 448
_DIGEST = bytes(32)


def make_adapter(weights: int) -> State:
    """Return a random adapter with about this number of weights."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{i}.lora.weight": torch.randn(weights // _ARRAYS, generator=generator)
        for i in range(_ARRAYS)
    }


def mask_update(adapter: State, received: State, members: int) -> Arrays:
    """Return what a client sends, as in ``client_app/masked_sums.py``."""
    keys = [X25519PrivateKey.generate() for _ in range(members)]
    peers = {f"m{i}": k.public_key().public_bytes_raw().hex() for i, k in enumerate(keys) if i}
    arrays = {
        name: encode_update(value.numpy() - received[name].double().numpy(), 1 / members, 1.0)
        for name, value in adapter.items()
    }
    Masks(_DIGEST, "m0", keys[0], peers).add_to(arrays)
    return arrays


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call, in seconds."""
    before = time.process_time()
    work()
    return time.process_time() - before


def measure(weights: int, members: int, pairs: int) -> list[str]:
    """Return a row of the table: medians of CPU seconds, and the ratio of bytes."""
    adapter = make_adapter(weights)
    received = {name: torch.zeros_like(value) for name, value in adapter.items()}
    record, mean = to_arrays(adapter), WeightedMean()
    mean.add(adapter, 1)
    upload = mask_update(adapter, received, members)
    sides: list[Callable[[], object]] = [
        lambda: mask_update(adapter, received, members),
        lambda: to_arrays(adapter),
        lambda: sum_arrays(iter([upload, upload])),
        lambda: mean.add(from_arrays(record), 1),
    ]
    times = [[cpu_seconds(side) for side in sides] for _ in range(pairs)]
    size = sum(array.nbytes for array in upload.values())
    plain = sum(4 * value.numel() for value in adapter.values())
    seconds = [f"{median(each):.2f} s" for each in zip(*times, strict=True)]
    return [f"{weights:,}", str(members), *seconds, f"{size / plain:.3f}"]


def main() -> None:
    """Print a table of CPU seconds and bytes."""
    parser = command(__doc__, pairs=5)
    parser.add_argument("--members", type=int, nargs="+", default=[3, 10, 50])
    parser.add_argument("--weights", type=float, nargs="+", default=[8e6, 40e6])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    headings = ("client: masked", "plain", "coordinator: masked", "plain")
    table = make_table("weights", "members", *headings, "bytes ÷")
    for weights in map(int, arguments.weights):
        for members in arguments.members:
            table.add_row(*measure(weights, members, arguments.pairs))
    show("CPU seconds for each client", table)


if __name__ == "__main__":
    main()
