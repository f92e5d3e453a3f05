"""Convert the events of a run to lines of text, for output that isn't a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from federation.answers import MODELS
from federation.run_folder import Event
from split.protocol.errors import printable


def run_lines(config: Mapping[str, Any], events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each finished training round and evaluation.

    Further events only append lines, so lines can be printed while a run continues.
    """
    by_round: dict[int, list[Event]] = {}
    for event in events:
        by_round.setdefault(event.get("round", 0), []).append(event)
    for event in events:
        number = event.get("round", 0)
        name = f"round {number} of {config['rounds']}" if number else "base model"
        own = by_round[number]
        if event["event"] == "refused":
            yield f"{name}: not registered: {_reasons(event)}"
        if event["event"] == "round":
            trained = [e for e in own if e["event"] == "train"]
            # The event of a round is recorded before the events of its participants.
            if {e["client"] for e in trained} >= set(event.get("participants", [])):
                yield _line(f"{name}: trained", event, _trained(trained), _reasons(event))
        if event["event"] == "late":
            yield f"{name}: averaged again with late replies: {', '.join(event['clients'])}"
        if event["event"] == "evaluation":
            missing = [e for e in own if e["event"] == "evaluation-missing"]
            reasons = "".join(map(_reasons, missing[-1:]))
            losses = _evaluated([e for e in own if e["event"] == "evaluate"])
            if losses or reasons:
                yield _line(f"{name}: evaluated", event, losses, reasons)


def _line(what: str, event: Event, losses: str, left_out: str) -> str:
    duration = f"{what} in {event.get('seconds', 0):.0f} s"
    return "; ".join(filter(None, (duration, losses, left_out and f"left out: {left_out}")))


def _reasons(event: Event) -> str:
    return ", ".join(
        printable(f"{out['client']} ({out['reason']})", 200) for out in event.get("left_out", [])
    )


def _trained(events: Sequence[Event]) -> str:
    losses = {e["client"]: [e["loss"]] for e in events if e.get("loss") is not None}
    return f"training loss {_listed(losses)}" if losses else ""


def _evaluated(events: Sequence[Event]) -> str:
    known = [e for e in events if e.get("loss") is not None]
    models = [model for model in MODELS if any(e["model"] == model for e in known)]
    by_client: dict[str, dict[str, float]] = {}
    for event in known:
        by_client.setdefault(event["client"], {})[event["model"]] = event["loss"]
    whole = {
        client: [own[model] for model in models]
        for client, own in sorted(by_client.items())
        if own.keys() >= set(models)
    }
    return f"held-out loss ({'/'.join(models)}) {_listed(whole)}" if whole else ""


def _listed(losses: Mapping[str, Sequence[float]]) -> str:
    """Return the losses of one or more models by client, or their means for many clients."""
    if len(losses) <= 4:
        return ", ".join(f"{printable(name)} {_numbers(own)}" for name, own in losses.items())
    means = [fmean(values) for values in zip(*losses.values(), strict=True)]
    return f"{_numbers(means)}, mean of {len(losses)} clients"


def _numbers(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
