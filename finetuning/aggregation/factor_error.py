"""The error of averaging LoRA's factors instead of their products."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from finetuning.adapters.adapter import State

# The name of a module's matrix B, and the matrices A and B of each client.
Factors = tuple[str, State, State]


def pair_factors(tensors: Iterable[tuple[str, State]]) -> Iterator[Factors]:
    """Yield the clients' matrices A and B of each module, given tensors by name and client."""
    waiting: dict[str, State] = {}
    for name, values in tensors:
        if ".lora_A." in name:
            waiting[name.replace(".lora_A.", ".lora_B.")] = values
        elif name in waiting:
            yield name, waiting.pop(name), values


def factor_error(modules: Iterable[Factors], weights: Mapping[str, float]) -> float | None:
    """Return the relative error of the product of the averages, B̄Ā, as an average of products BA.

    It is the Frobenius norm of Σ wᵢBᵢAᵢ − B̄Ā divided by that of Σ wᵢBᵢAᵢ, over all modules, with
    weights of any positive sum; None if there are no modules, or all products are 0. No product is
    computed: with the QR decompositions of the stacked factors, only small matrices are multiplied.
    """
    total = sum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    wrong = exact = 0.0
    for _, a, b in modules:
        rows = [a[name].double() for name in shares]
        columns = [b[name].double() for name in shares]
        weighted = [share * each for share, each in zip(shares.values(), columns, strict=True)]
        mean_a = torch.stack([shares[name] * a[name].double() for name in shares]).sum(0)
        mean_b = torch.stack(weighted).sum(0)
        right = torch.linalg.qr(torch.cat([*rows, mean_a]).T).R
        left = torch.linalg.qr(torch.cat([*weighted, -mean_b], dim=1)).R
        rank = mean_a.shape[0]
        wrong += float((left @ right.T).square().sum())
        exact += float((left[:, :-rank] @ right[:, :-rank].T).square().sum())
    return math.sqrt(wrong / exact) if exact else None
