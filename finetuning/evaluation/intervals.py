"""Confidence intervals of means."""

import math
from collections.abc import Sequence
from statistics import stdev


def half_width(values: Sequence[float]) -> float:
    """Return half the width of a mean's 95 % confidence interval, for two or more values (t)."""
    from scipy.stats import t

    quantile = float(t.ppf(0.975, len(values) - 1))
    return quantile * stdev(values) / math.sqrt(len(values))
