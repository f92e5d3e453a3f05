"""Confidence intervals of means."""

import math
from collections.abc import Sequence
from statistics import stdev


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of a mean, by Student's t.

    Raises:
        ValueError: There are fewer than two values.

    """
    if len(values) < 2:
        raise ValueError("an interval needs at least two values")
    from scipy.stats import t

    quantile = float(t.ppf(0.975, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))
