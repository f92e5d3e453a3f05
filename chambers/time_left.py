"""Estimate the remaining time of a run from its finished rounds and evaluations."""

from collections.abc import Mapping, Sequence
from typing import Any

from federation.run_folder import Event, RunStatus

# Number of recent rounds over which durations are averaged.
_RECENT_ROUNDS = 5
# Minimum share of completed steps for estimating a round's duration from its progress.
_LEAST_SHARE = 0.1
# Expected duration of later evaluations, which measure two models, relative to that of the first,
# which measures one; less than 2, since the first also loads the model.
_LATER_EVALUATION = 1.5


def time_left(
    config: Mapping[str, Any], status: RunStatus, events: Sequence[Event], now: float
) -> float | None:
    """Estimate the seconds until a run ends; return None before the end of the first round.

    The run must be in training or evaluation; ``now`` is in seconds since the epoch.
    """
    training, evaluations = _durations(events, "round"), _durations(events, "evaluation")
    if not training:
        return None
    rounds, every = int(config["rounds"]), int(config.get("evaluate.every", 1))

    def measures_losses(number: int) -> bool:
        # After other rounds, there is a shorter evaluation or none, depending on the strategy.
        return number == rounds or number % every == 0

    # Durations of evaluations, by whether they measure losses. If the next round has started
    # without an evaluation event, there was no evaluation.
    expected = {True: evaluations.get(0, 0.0) * _LATER_EVALUATION, False: 0.0}
    ended = [n for n in training if n in evaluations or n < status.round]
    for kind in expected:
        if alike := {n: evaluations.get(n, 0.0) for n in ended if measures_losses(n) is kind}:
            expected[kind] = _recent_mean(alike)
    round_seconds, elapsed = _recent_mean(training), now - status.since
    ahead = range(status.round + 1, rounds + 1)
    left = sum(round_seconds + expected[measures_losses(number)] for number in ahead)
    own = expected[measures_losses(status.round)]
    if status.phase == "evaluation":
        over = status.round in evaluations
        return left if over else left + max(0.0, own - elapsed)
    return left + _left_of_round(status, round_seconds, elapsed) + own


def _durations(events: Sequence[Event], kind: str) -> dict[int, float]:
    """Return the durations in seconds of all events of a kind, by round."""
    return {e["round"]: e["seconds"] for e in events if e["event"] == kind and "seconds" in e}


def _recent_mean(seconds: Mapping[int, float]) -> float:
    recent = [seconds[number] for number in sorted(seconds)[-_RECENT_ROUNDS:]]
    return sum(recent) / len(recent)


def _left_of_round(status: RunStatus, expected: float, elapsed: float) -> float:
    """Return the estimated remaining seconds of the current round's training."""
    done = [lane.steps / lane.planned for lane in status.lanes if lane.planned]
    ended = {*status.replied, *status.left_out} - {lane.client for lane in status.lanes}
    share = (len(ended) + sum(done)) / max(1, len(status.asked), len(ended) + len(done))
    if done and share >= _LEAST_SHARE:
        # The steps were counted when the status was written.
        expected = (status.updated - status.since) / share
    return max(0.0, expected - elapsed)
