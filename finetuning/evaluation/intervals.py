"""Confidence intervals of means."""

import math
from collections.abc import Sequence
from statistics import stdev


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % Student's t interval of the mean of two or more values."""
    from scipy.stats import t

    quantile = float(t.ppf(0.975, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))
