"""The estimated remaining time of runs whose durations are known."""

import pytest

from chambers.time_left import time_left
from federation.run_folder import LaneStatus, RunStatus


def timeline(rounds, every, training, measured, other, base):
    """Yield a run's phases: their names, rounds and seconds, beginning with the base model."""
    yield "evaluation", 0, base
    for number in range(1, rounds + 1):
        yield "training", number, training(number)
        measures = number % every == 0 or number == rounds
        seconds = measured if measures else other
        if seconds:
            yield "evaluation", number, seconds


@pytest.mark.parametrize(
    ("rounds", "every", "measured", "other", "base"),
    [
        (6, 1, 20, 0, 15),
        (6, 1, 400, 0, 300),  # evaluations take most of the time
        (6, 6, 100, 0, 80),  # only the last round is followed by one
        (9, 3, 120, 20, 100),  # FedJudge-CL has shorter ones after other rounds
        (2, 2, 90, 0, 60),
    ],
)
def test_it_is_right_within_a_factor_of_two(rounds, every, measured, other, base):
    config = {"rounds": rounds, "evaluate.every": every}
    phases = list(timeline(rounds, every, lambda n: 35 + 5 * (n % 3), measured, other, base))
    end = sum(seconds for _, _, seconds in phases)
    now, events, estimates = 0.0, [], 0
    for phase, number, seconds in phases:
        status = RunStatus(phase=phase, round=number, rounds=rounds, since=now, updated=now)
        for passed in (0.0, 0.3 * seconds, 0.6 * seconds, 0.9 * seconds):
            estimate = time_left(config, status, events, now + passed)
            left = end - now - passed
            if number <= 1 and phase != "evaluation":
                assert estimate is None
            elif number and left > 0.1 * end:
                assert left / 2 <= estimate <= left * 2, (phase, number, passed)
                estimates += 1
        now += seconds
        kind = "round" if phase == "training" else "evaluation"
        events.append({"event": kind, "round": number, "seconds": float(seconds)})
    assert estimates


def test_steps_within_a_round_correct_it():
    """One client has replied, the second is halfway, and the third waits for its turn."""
    events = [
        {"event": "evaluation", "round": 0, "seconds": 0.0},
        {"event": "round", "round": 1, "seconds": 30.0},
        {"event": "evaluation", "round": 1, "seconds": 6.0},
    ]
    status = RunStatus(
        phase="training",
        round=2,
        rounds=2,
        since=100.0,
        updated=150.0,
        asked=["alpha", "beta", "gamma"],
        replied=["alpha"],
    )
    config = {"rounds": 2, "evaluate.every": 1}
    assert time_left(config, status, events, 155.0) == 6
    status.lanes = [LaneStatus(client="beta", steps=5, planned=10, tokens=1)]
    assert time_left(config, status, events, 155.0) == pytest.approx(45 + 6)
