"""Capped averages: exact below the caps, independent of order, and never beyond the caps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetuning.aggregation.robust_aggregation import (
    ImportanceCap,
    believed_sizes,
    counted_sizes,
    distance,
    scale_update,
    update_caps,
    update_factors,
)

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")
sizes = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 10**9), min_size=1)
distances = st.dictionaries(
    st.sampled_from(NAMES), st.floats(0, 1e9, allow_subnormal=False), min_size=1
)


def others_median(values: dict[str, float], name: str) -> float:
    """Return the median of the other clients' values, or the larger of the two middle values."""
    others = sorted(value for other, value in values.items() if other != name)
    return others[len(others) // 2]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(20, generator=generator) for name in ("A", "B")}


@given(distances, st.dictionaries(st.sampled_from(NAMES), st.floats(1, 10)))
def test_an_update_is_capped_relative_to_the_median_of_others(values, caps):
    factors = update_factors(values, caps)
    moved = {name: value for name, value in values.items() if value > 0}
    for name, value in values.items():
        ratio = caps.get(name, 10)
        most = ratio * others_median(moved, name) if len(moved) > 1 and value else value
        if value <= most:
            assert factors[name] == 1
        else:
            assert factors[name] * value == pytest.approx(most)
    assert update_factors(dict(reversed(values.items())), caps) == factors


@given(sizes, sizes, st.floats(1, 10))
def test_sizes_are_limited_by_agreements_or_the_median(values, agreed, most):
    """Without an agreement, the product of size and distance is limited like the distance."""
    known = {name: min(size, agreed.get(name, size)) for name, size in values.items()}
    believed, caps = believed_sizes(values, agreed), update_caps(values, agreed, most)
    for name, size in known.items():
        median = others_median(known, name) if len(known) > 1 else size
        assert believed[name] == (size if name in agreed else min(size, 3 * median))
        ratio = 1.0 if name in agreed else max(1.0, believed[name] / median)
        assert caps[name] == pytest.approx(most / ratio)
    assert believed_sizes(values, None) == values
    assert set(update_caps(values, None, most).values()) == {most}


@given(st.integers(0, 100), st.floats(1e-9, 1.0))
def test_a_scaled_update_is_as_long_as_it_may_be(seed, factor):
    state, reference = drawn(seed), drawn(seed + 1)
    result = scale_update(state, reference, factor)
    assert distance(result, reference) == pytest.approx(
        factor * distance(state, reference), rel=1e-5, abs=1e-6
    )
    assert scale_update(state, reference, 1.0) is state


@given(sizes, st.floats(0.01, 1.0))
def test_nobody_has_more_than_the_largest_share(values, largest):
    counted = counted_sizes(values, largest)
    total, feasible = sum(counted.values()), max(largest, 1 / len(values))
    assert counted_sizes(dict(reversed(values.items())), largest) == counted
    assert max(counted.values()) <= feasible * total * (1 + 1e-9) + 1
    assert all(0 < counted[name] <= size for name, size in values.items())
    if max(values.values()) <= largest * sum(values.values()):
        assert counted == values
    else:
        # All capped sizes are equal, and the others are unchanged.
        assert {counted[n] for n, size in values.items() if counted[n] < size} <= {
            max(counted.values())
        }


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1.0, {"alpha": 24, "beta": 12, "gamma": 10**9}),
        (0.75, {"alpha": 24, "beta": 12, "gamma": 108}),
        (0.5, {"alpha": 24, "beta": 12, "gamma": 36}),
        (0.4, {"alpha": 24, "beta": 12, "gamma": 24}),
        (0.1, {"alpha": 12, "beta": 12, "gamma": 12}),
    ],
)
def test_a_thousand_million_rows_count_as_a_share(largest, expected):
    assert counted_sizes({"alpha": 24, "beta": 12, "gamma": 10**9}, largest) == expected


def importance(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a heavy-tailed J, in which one tensor has hardly any importance."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(2, 4000, generator=generator).exp() * scale
    return {"A": draws[0], "B": draws[1] * 1e-6}


def capped(clients: dict[str, dict[str, torch.Tensor]]):
    cap = ImportanceCap()
    for key in ("A", "B"):
        cap.add({name: state[key] for name, state in clients.items()})
    states = {key: cap.cap({n: state[key] for n, state in clients.items()}) for key in ("A", "B")}
    return states, cap.factors


@given(st.integers(2, 5), st.integers(0, 50))
def test_honest_importance_stays_bit_for_bit(count, seed):
    clients = {NAMES[i]: importance(10 * seed + i, 1 + 0.2 * i) for i in range(count)}
    states, factors = capped(clients)
    assert factors == {}
    assert all(states[key][name] is state[key] for name, state in clients.items() for key in "AB")


@pytest.mark.parametrize(("share", "is_capped"), [(0.099, False), (0.101, True)])
def test_excess_importance_is_compared_with_the_rest(share, is_capped):
    clients = {name: {"A": torch.ones(1000), "B": torch.zeros(10)} for name in NAMES[:3]}
    clients["alpha"]["A"][0] = 5 + share * (999 + 5)
    _, factors = capped(clients)
    assert ("alpha" in factors) is is_capped


@given(st.integers(2, 5), st.sampled_from([10.0, 1.0e3, 2.0**30]), st.booleans())
def test_exaggerated_importance_becomes_what_is_typical(count, value, everywhere):
    honest = {NAMES[i]: importance(i) for i in range(1, count)}
    flat = {key: torch.full_like(v, value) for key, v in importance(0).items()}
    flat = flat if everywhere else {"A": importance(0)["A"], "B": flat["B"]}
    clients = {"alpha": flat, **honest}
    states, factors = capped(clients)
    assert factors.keys() == {"alpha"}
    for key in "AB":
        others = torch.stack([state[key] for state in honest.values()])
        # The median of the others' values, and the median of their means over the tensor.
        median = others.sort(dim=0).values[len(honest) // 2]
        mean = others.mean(dim=1).sort().values[len(honest) // 2]
        assert (states[key]["alpha"] <= median.clamp(min=float(mean))).all()
        assert all(states[key][name] is state[key] for name, state in honest.items())
    swapped, _ = capped(dict(reversed(clients.items())))
    assert all(torch.equal(states[key]["alpha"], swapped[key]["alpha"]) for key in "AB")
    left = sum(float(states[key]["alpha"].double().sum()) for key in "AB")
    assert factors["alpha"] == pytest.approx(
        left / sum(float(flat[key].double().sum()) for key in "AB")
    )
