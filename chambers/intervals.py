"""Means of values that several seeds have measured, with their confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

# For each seed, the values of its questions.
BySeed = Sequence[NDArray[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval, which is NaN if it isn't known."""

    mean: float  # mean over seeds of the means over questions
    low: float
    high: float
    seeds: tuple[float, ...]  # each seed's mean over questions


def interval(
    values: BySeed,
    shared: bool = False,
    lowest: float = -math.inf,
    highest: float = math.inf,
    confidence: float = 0.95,
) -> Interval:
    """Return the mean of values between ``lowest`` and ``highest``, and its interval.

    The squares of two half-widths are added: that over the seeds' means, and that over questions,
    both by Student's t. If all seeds have ``shared`` questions, the latter is of each question's
    mean over seeds, so more seeds don't reduce it. The former also contains an effect of the
    questions, so the interval is somewhat too wide.

    If all values are 0, or all are 1, and none can be smaller or larger, the interval is the exact
    one of a share. It isn't known if all values are equal otherwise, or there is only one.
    """
    means, counts = [float(of_seed.mean()) for of_seed in values], [len(each) for each in values]
    if shared:
        of_questions, freedom = _error(np.mean(values, axis=0)), counts[0] - 1
    else:
        of_questions = float(np.linalg.norm([_error(each) for each in values])) / len(values)
        freedom = sum(counts) - len(values)
    errors = np.array([_error(np.array(means)), of_questions])
    quantiles = t.ppf((1 + confidence) / 2, [max(1, len(means) - 1), max(1, freedom)])
    half, mean = float(np.linalg.norm(errors * quantiles)), float(np.mean(means))
    if np.allclose(errors, 0.0, atol=1e-12):
        questions = counts[0] if shared else sum(counts)
        is_share = (lowest, highest) == (0.0, 1.0) and mean in (0.0, 1.0) and questions > 1
        half = 1 - ((1 - confidence) / 2) ** (1 / questions) if is_share else math.nan
        return Interval(mean, max(mean - half, 0.0), min(mean + half, 1.0), tuple(means))
    return Interval(mean, max(lowest, mean - half), min(highest, mean + half), tuple(means))


def are_equal(values: BySeed, margin: float, shared: bool = False) -> bool:
    """Return whether the mean is shown to be within ± ``margin``: two one-sided tests at 5 %."""
    found = interval(values, shared, confidence=0.9)
    return -margin < found.low and found.high < margin


def _error(values: NDArray[np.float64]) -> float:
    """Return the standard error of the mean, 0 for a single value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
