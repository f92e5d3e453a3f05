"""Averages of adapters of different ranks: exact products, their best parts, and no collapse."""

import pytest
import torch

from finetuning.aggregation.mixed_ranks import average_ranks, complete, cut, pad

WEIGHTS = {"a": 3, "b": 2, "c": 1}
A, B = "x.lora_A.weight", "x.lora_B.weight"


def adapter(rank, seed, outputs=20, inputs=30):
    generator = torch.Generator().manual_seed(seed)
    return {
        A: torch.randn(rank, inputs, generator=generator),
        B: torch.randn(outputs, rank, generator=generator),
    }


def average(states, previous, weights=WEIGHTS):
    tensors = ((name, {c: s[name] for c, s in states.items()}) for name in (A, B))
    return average_ranks(tensors, weights, previous)


def test_equal_ranks_give_the_mean_of_the_products():
    states = {name: adapter(2, seed) for seed, name in enumerate(WEIGHTS)}
    averaged = average(states, pad(cut(adapter(8, 9), 2), 8) | {A: adapter(8, 9)[A]})
    mean = sum(w / 6 * states[n][B].double() @ states[n][A].double() for n, w in WEIGHTS.items())
    torch.testing.assert_close(averaged[B] @ averaged[A], mean.float(), atol=1e-5, rtol=1e-5)
    # A client of a smaller rank gets the best approximation (Eckart and Young).
    small = cut(averaged, 3)
    u, s, v = torch.linalg.svd(mean)
    best = (u[:, :3] * s[:3] @ v[:3]).float()
    torch.testing.assert_close(small[B] @ small[A], best, atol=1e-5, rtol=1e-5)
    # The unused components can be trained: B is 0, as in a new adapter, but A isn't.
    assert torch.all(averaged[B][:, 6:] == 0)
    assert torch.equal(averaged[A][6:], adapter(8, 9)[A][6:])


def test_padding_and_completion_keep_what_a_client_has():
    small, large = adapter(2, 0), adapter(5, 1)
    padded = pad(small, 5)
    torch.testing.assert_close(padded[B] @ padded[A], small[B] @ small[A])
    whole = complete(small, large)
    assert all(torch.equal(cut(whole, 2)[n], small[n]) for n in small)
    assert torch.equal(whole[A][2:], large[A][2:]) and torch.equal(whole[B][:, 2:], large[B][:, 2:])


def test_components_of_absent_clients_stay():
    previous, own = adapter(8, 9), adapter(3, 1)
    averaged, whole = average({"a": own}, previous, {"a": 1}), complete(own, previous)
    expected = whole[B] @ whole[A]
    torch.testing.assert_close(averaged[B] @ averaged[A], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("partitioned", "remaining"), [(True, 0.99), (False, 0.01)])
def test_high_ranks_do_not_collapse(partitioned, remaining):
    """Clients return what they received: components of large ranks must not shrink."""
    start = adapter(8, 3)
    state = average({"c": start}, start, {"c": 1})
    ranks = {"a": 2, "b": 2, "c": 8}

    def energy(of):
        return float(torch.linalg.svdvals(of[B] @ of[A])[2:].square().sum())

    before = energy(state)
    for _ in range(8):
        states = {name: cut(state, rank) for name, rank in ranks.items()}
        if not partitioned:  # weights that ignore ranks, as in FlexLoRA
            states = {name: pad(own, 8) for name, own in states.items()}
        state = average(states, state)
    if partitioned:
        assert energy(state) > remaining * before
    else:
        assert energy(state) < remaining * before
