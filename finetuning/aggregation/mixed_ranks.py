"""Averages of LoRA adapters of different ranks, for clients with unequal machines.

As in FlexLoRA (Bai et al., 2024), the weighted mean of the clients' products BA is decomposed by an
SVD, and each client receives the components with the largest singular values. As in raFLoRA (Wu et
al., 2026), components that only clients of larger ranks have are weighted among these clients; with
the weights of all clients, they would shrink in every round until they vanish (rank collapse).
Components that no client of a round has stay as they are.
"""

from collections.abc import Iterable, Mapping

import torch

from finetuning.adapters.adapter import State
from finetuning.aggregation.factor_error import pair_factors

_A, _B = ".lora_A.", ".lora_B."
# Singular values below this share of the largest one are rounding errors.
_NEGLIGIBLE = 1e-6


def cut(state: Mapping[str, torch.Tensor], rank: int) -> State:
    """Return the first ``rank`` components of an adapter."""
    return {
        name: (value[:rank] if _A in name else value[:, :rank]).contiguous()
        for name, value in state.items()
    }


def pad(state: Mapping[str, torch.Tensor], rank: int) -> State:
    """Return an adapter of rank ``rank`` with the same products, by adding zeros."""
    padded = {}
    for name, value in state.items():
        missing = rank - value.shape[0 if _A in name else 1]
        amounts = (0, 0, 0, missing) if _A in name else (0, missing)
        padded[name] = torch.nn.functional.pad(value, amounts)
    return padded


def complete(state: Mapping[str, torch.Tensor], reference: State) -> State:
    """Return an adapter with the components of ``reference`` that it lacks."""
    completed = {}
    for name, value in state.items():
        rank = value.shape[0 if _A in name else 1]
        rest = reference[name][rank:] if _A in name else reference[name][:, rank:]
        completed[name] = torch.cat([value, rest], 0 if _A in name else 1)
    return completed


def stack(a: State, b: State, weights: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 factors A and B whose product is the rank-partitioned mean of products.

    ``a`` contains each client's A, (rank, inputs), and ``b`` its B, (outputs, rank).
    """
    ranks = {name: value.shape[0] for name, value in a.items()}
    rows, columns, first = [], [], 0
    for last in sorted(set(ranks.values())):
        members = [name for name in a if ranks[name] >= last]
        total = sum(weights[name] for name in members)
        for name in members:
            rows.append(a[name][first:last].double())
            columns.append(weights[name] / total * b[name][:, first:last].double())
        first = last
    return torch.cat(rows), torch.cat(columns, dim=1)


def decompose(
    rows: torch.Tensor, columns: torch.Tensor, previous: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A, (rank, inputs), and B, (outputs, rank), nearest to the product ``columns @ rows``.

    Both contain the square roots of the singular values. ``previous`` is the previous A. Where the
    product has fewer components than its rank, A keeps its rows, and B has zeros, so that clients
    can train them.
    """
    rank = len(previous)
    q_a, r_a = torch.linalg.qr(rows.T)
    q_b, r_b = torch.linalg.qr(columns)
    u, singular, v = torch.linalg.svd(r_b @ r_a.T)
    used = int((singular[:rank] > _NEGLIGIBLE * singular[0]).sum())
    roots = singular[:used].sqrt()
    a, b = previous.clone(), torch.zeros(len(columns), rank)
    a[:used] = (roots[:, None] * (v[:used] @ q_a.T)).float()
    b[:, :used] = ((q_b @ u[:, :used]) * roots).float()
    return a, b


def average_ranks(
    tensors: Iterable[tuple[str, State]], weights: Mapping[str, float], previous: State
) -> State:
    """Return the next global adapter, given the clients' tensors by name and client.

    ``previous`` is the round's initial global adapter, which has the largest rank.
    """
    averaged: State = {}
    for name, a, b in pair_factors(tensors):
        name_a = name.replace(_B, _A)
        rows, columns = stack(a, b, weights)
        largest = max(len(value) for value in a.values())
        # Keep the components that no client of the round has.
        rows = torch.cat([rows, previous[name_a][largest:].double()])
        columns = torch.cat([columns, previous[name][:, largest:].double()], dim=1)
        averaged[name_a], averaged[name] = decompose(rows, columns, previous[name_a])
    return averaged
