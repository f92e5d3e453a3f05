"""Means, intervals and paired differences."""

import numpy as np
import pytest

from chambers.experiment.results import difference, interval


def drawn(seeds, questions, mean=0.0, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(mean, 1.0, questions) for _ in range(seeds)]


def test_with_one_seed_an_interval_is_that_of_the_mean_over_questions():
    (values,) = drawn(1, 400, mean=3.0)
    found = interval([values])
    error = values.std() / np.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)
    assert found.detectable == pytest.approx(2.8 * error, rel=0.05)


def test_seeds_that_differ_widen_an_interval():
    same = [np.zeros(100) + noise for noise in drawn(5, 100)]
    apart = [values + shift for values, shift in zip(same, (-2, -1, 0, 1, 2), strict=True)]
    narrow, wide = interval(same), interval(apart)
    # A bootstrap of five equidistant means: the standard error is their deviation / √5.
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * np.sqrt(2.0) / np.sqrt(5), rel=0.1)
    assert narrow.high - narrow.low < 0.3 * (wide.high - wide.low)


def test_most_intervals_contain_the_mean():
    found = [interval(drawn(8, 30, mean=1.0, seed=seed)) for seed in range(24)]
    assert sum(each.low <= 1.0 <= each.high for each in found) >= 20


def test_questions_that_all_seeds_share_count_once():
    (values,) = drawn(1, 100)
    one, three = interval([values]), interval([values] * 3, shared=True)
    assert three.high - three.low == pytest.approx(one.high - one.low, rel=0.05)
    apart = interval([values] * 3)
    assert apart.high - apart.low < 0.8 * (one.high - one.low)


def test_pairing_removes_what_questions_have_in_common():
    common = [10 * values for values in drawn(3, 50)]
    noise = drawn(3, 50, seed=1)
    better = [a + 0.5 + b / 10 for a, b in zip(common, noise, strict=True)]
    found = difference(better, common)
    assert found.low > 0 and found.mean == pytest.approx(0.5, abs=0.1)
    assert difference(common, common).low == difference(common, common).high == 0
    with pytest.raises(ValueError, match="paired"):
        difference(better, common[:2])
