"""What clients upload for a masked sum, in addition to masks: arrays of fixed names and types."""

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

from federation.messages import LARGEST_METRIC, MODELS
from federation.sums.masks import CHECK, CHECKS, Arrays, decode_wide, encode_wide
from finetuning.evaluation.scoring import SCORES

METRICS = "sum.metrics"
# Sums of losses and scores of generated answers, each followed by the weight of its clients.
_METRICS = [f"{model}.{key}" for model in MODELS for key in ("loss", *SCORES)]


def expected_arrays(
    shapes: Mapping[str, Iterable[int]], dtype: str, with_metrics: bool
) -> ArrayRecord:
    """Return the names, shapes and types of an upload; the arrays have no data."""
    arrays = {name: (dtype, tuple(shape)) for name, shape in shapes.items()}
    arrays[CHECK] = ("uint64", (CHECKS,))
    if with_metrics:
        arrays[METRICS] = ("uint64", (2, len(_METRICS)))
    return ArrayRecord(
        {name: Array(kind, shape, "numpy.ndarray", b"") for name, (kind, shape) in arrays.items()}
    )


def encode_metrics(metrics: Mapping[str, float], share: float) -> npt.NDArray[np.uint64]:
    """Return a client's part of the group's metrics, of shape (2, number of metrics)."""
    known = [name in metrics for name in _METRICS]
    values = [min(metrics.get(name, 0.0), LARGEST_METRIC) for name in _METRICS]
    return encode_wide(np.array([values, known], dtype=np.float64), share)


def decode_metrics(totals: Arrays, clients: int) -> dict[str, float]:
    """Return the weighted means over the clients that have a metric; raise ``SumError``."""
    if METRICS not in totals:
        return {}
    sums, weights = decode_wide(totals[METRICS], clients)
    return {
        name: float(total / weight)
        for name, total, weight in zip(_METRICS, sums, weights, strict=True)
        if weight > 0
    }
