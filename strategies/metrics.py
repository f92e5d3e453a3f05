"""Averages of the clients' metrics, and the format of metrics in ``metrics.jsonl``."""

from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord, RecordDict

from federation.answers import MODELS
from federation.flower_internals import aggregate_metricrecords
from federation.messages import METRICS, SIZE


def averages(metrics: list[Mapping[str, Any]]) -> MetricRecord:
    """Average the metrics that all replies contain, weighted by data size."""
    shared = sorted(set.intersection(*(set(own) for own in metrics)))
    return aggregate_metricrecords(
        [RecordDict({METRICS: MetricRecord({key: own[key] for key in shared})}) for own in metrics],
        SIZE,
    )


def evaluation_events(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split metrics like ``global.loss`` into one event for each evaluated model."""
    events = []
    for model in MODELS:
        prefix = f"{model}."
        own = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if own:
            events.append({**{underscored(k): v for k, v in own.items()}, "model": model})
    return events


def underscored(key: str) -> str:
    """Return a key as it is spelled in ``metrics.jsonl``, with underscores."""
    return key.replace("-", "_")
