"""Means of models' values, and differences paired by seed and question, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_RESAMPLES = 10_000
# A difference of this many standard errors is detected at the 5 % level with 80 % power.
_DETECTABLE = 1.96 + 0.84

# For each seed, the values of its questions.
BySeed = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float  # mean over seeds of the means over questions
    low: float
    high: float
    detectable: float  # smallest true mean that is detected with 80 % power


def interval(values: BySeed) -> Interval:
    """Return the mean of values and its interval, by a hierarchical bootstrap.

    Seeds are drawn with replacement, and so are questions within each seed. The interval accounts
    for the choice of seeds and of questions; with one seed, only for the choice of questions.
    """
    generator = np.random.default_rng(0)  # a fixed seed: the same results yield the same table
    seeds = len(values)
    drawn = generator.integers(seeds, size=(_RESAMPLES, seeds))
    means = np.zeros(_RESAMPLES)
    for number, of_seed in enumerate(values):
        times = (drawn == number).sum(axis=1)
        for copy in range(int(times.max(initial=0))):
            chosen = generator.integers(len(of_seed), size=(_RESAMPLES, len(of_seed)))
            means += (times > copy) * np.asarray(of_seed)[chosen].mean(axis=1)
    means /= seeds
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(np.mean([np.mean(of_seed) for of_seed in values]))
    return Interval(mean, float(low), float(high), _DETECTABLE * float(means.std()))


def difference(values: BySeed, others: BySeed) -> Interval:
    """Return the mean difference of two models, paired by seed and question.

    Raise ``ValueError`` if the models have different numbers of seeds or questions.
    """
    if [len(each) for each in values] != [len(each) for each in others]:
        raise ValueError("only values of the same seeds and questions can be paired")
    return interval([np.asarray(a) - np.asarray(b) for a, b in zip(values, others, strict=True)])
