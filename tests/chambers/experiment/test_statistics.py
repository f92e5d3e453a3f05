"""Means and intervals of values that several seeds have measured."""

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from chambers.intervals import are_equal, interval


def drawn(seeds, questions, mean=0.0, seed=0, apart=0.0):
    """Draw values whose seeds' means vary with the standard deviation ``apart``."""
    generator = np.random.default_rng(seed)
    means = generator.normal(mean, apart, seeds)
    return [generator.normal(each, 1.0, questions) for each in means]


def test_the_interval_of_one_seed_is_over_questions():
    (values,) = drawn(1, 400, mean=3.0)
    found, error = interval([values]), values.std(ddof=1) / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.01 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.01 * error)
    assert found.seeds == (found.mean,)


def test_the_interval_of_different_seeds_is_by_student():
    values = drawn(3, 10_000, apart=1.0)
    expected = ttest_1samp([each.mean() for each in values], 0.0).confidence_interval(0.95)
    found = interval(values)
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.02)


@pytest.mark.parametrize("apart", [0.0, 0.3])
@pytest.mark.parametrize("shared", [False, True])
def test_intervals_of_three_seeds_contain_the_mean(apart, shared):
    def values(seed):
        common = drawn(1, 24, seed=10_000 + seed)[0] if shared else 0.0
        return [each + common for each in drawn(3, 24, mean=1.0, seed=seed, apart=apart)]

    found = [interval(values(seed), shared) for seed in range(400)]
    assert sum(each.low <= 1.0 <= each.high for each in found) >= 0.93 * 400


def test_means_at_the_margin_are_rarely_called_equal():
    def equal(mean):
        found = [are_equal(drawn(12, 24, mean, seed, apart=0.2), 0.4) for seed in range(400)]
        return sum(found) / 400

    assert equal(0.4) <= 0.05 and equal(-0.4) <= 0.05 and equal(0.0) >= 0.95


def test_questions_that_all_seeds_share_count_once():
    (values,) = drawn(1, 100)
    one, three = interval([values]), interval([values] * 3, shared=True)
    assert three.high - three.low == pytest.approx(one.high - one.low)
    apart = interval([values] * 3)
    assert apart.high - apart.low < 0.6 * (one.high - one.low)


def test_a_single_value_shows_nothing():
    found = interval([np.array([0.25])])
    assert found.mean == 0.25 and np.isnan([found.low, found.high]).all()
    assert not are_equal([np.array([0.0])], 1.0)


def test_an_interval_ends_at_the_possible_values():
    found = interval([np.array([1.0, 0.0, 1.0, 1.0])], lowest=0.5, highest=1.0)
    assert (found.low, found.mean, found.high) == (0.5, 0.75, 1.0)


def test_equal_values_are_no_proof():
    none = interval([np.zeros(9)], lowest=0.0, highest=1.0)
    exact = binomtest(0, 9).proportion_ci(method="exact")
    assert (none.low, none.mean, none.high) == (0.0, 0.0, pytest.approx(exact.high))
    every = interval([np.ones(4), np.ones(5)], lowest=0.0, highest=1.0)
    assert (every.low, every.high) == (pytest.approx(1 - exact.high), 1.0)
    for values, limits in ((0.25, (0.0, 1.0)), (0.0, (-1.0, 1.0))):
        found = interval([np.full(3, values)] * 2, False, *limits)
        assert found.mean == values and np.isnan([found.low, found.high]).all()
    assert not are_equal([np.zeros(2)] * 3, 1.0)
