"""The maximum share of the body's gradient that one client can have, in numbers."""

import pytest

from split.server.schedules.gradient_cap import Addition, GradientCap
from split.server.schedules.share_cap import ShareCap


def test_what_counts_of_a_capped_client_is_what_was_left_of_it():
    """Otherwise one exaggeration would raise the others' caps for the whole round."""
    cap, ones = ShareCap(3.0), dict.fromkeys("abc", 1)
    assert cap.factors({"a": 1.0, "b": 1.0, "c": 1e12}, ones)["c"] == pytest.approx(3e-6)
    assert cap.factors({"a": 1e12}, {"a": 1})["a"] == pytest.approx(9e-6)


def test_a_step_counts_whatever_its_micro_batches_and_targets():
    """A client with three micro-batches of many targets is compared with one that has a single."""
    cap = GradientCap(3.0)
    additions = {
        "a": Addition(size=8.0, targets=8, step_targets=8),
        "b": Addition(size=20.0, targets=20, step_targets=60),
    }
    assert cap.factors(additions) == {"a": 1.0, "b": pytest.approx(24 / 60)}
    assert cap.counted(additions) == pytest.approx(8 + 20 * 24 / 60)
    assert cap.late_factors() == (1.0, 1.0)
    assert [cap.times_capped(name) for name in "ab"] == [0, 2]


def test_a_gradient_above_both_caps_is_scaled_to_the_smaller():
    additions = {
        "a": Addition(size=8.0, targets=8, step_targets=8),
        "b": Addition(size=6000.0, targets=20, step_targets=60),
    }
    assert GradientCap(3.0).factors(additions)["b"] == pytest.approx(24 / 18000)


def test_the_targets_of_the_first_client_are_capped_late():
    cap = GradientCap(3.0)
    first = {"a": Addition(size=80.0, targets=80, step_targets=80)}
    assert (cap.factors(first), cap.counted(first)) == ({"a": 1.0}, 80.0)
    second = {"b": Addition(size=8.0, targets=8, step_targets=8)}
    assert (cap.factors(second), cap.counted(second)) == ({"b": 1.0}, 8.0)
    assert cap.late_factors() == (pytest.approx(24 / 80), pytest.approx(24 / 80))
