"""Rounds with a sample of the clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.run_config import parse_run_config
from tests.in_process import run_in_process


def events(journal, name):
    return [event for event in journal.events if event["event"] == name]


def sampled(values, folder, **changed):
    values = values | {"rounds": 4, "train.local-steps": 1, "sample": 0.34, "min-nodes": 1}
    return run_in_process(values | changed, folder, 3)


def test_each_round_draws_anew_and_evaluations_ask_one_draw(values, tmp_path):
    journal = sampled(values, tmp_path)
    trained = [event["participants"] for event in events(journal, "round")]
    assert [len(names) for names in trained] == [1] * 4
    assert len({*map(tuple, trained)}) > 1
    assert not any(event["left_out"] for event in events(journal, "round"))
    assert len({event["client"] for event in events(journal, "evaluate")}) == 1
    assert {*journal.kept} == {name for names in trained for name in names}


@pytest.mark.slow
def test_the_draw_depends_on_the_seed_alone(values, tmp_path):
    rounds = [
        [
            event["participants"]
            for event in events(sampled(values, tmp_path / name, seed=seed), "round")
        ]
        for name, seed in (("a", 0), ("b", 0), ("c", 3))
    ]
    assert rounds[0] == rounds[1] != rounds[2]


def test_no_fewer_than_min_nodes_are_drawn(values, tmp_path):
    journal = sampled(values, tmp_path, **{"min-nodes": 2, "sample": 0.01, "rounds": 1})
    assert [len(event["participants"]) for event in events(journal, "round")] == [2]


@given(clients=st.integers(1, 10_000), sample=st.floats(1e-6, 1.0))
def test_a_sample_has_its_share_and_at_least_one(clients, sample):
    number = parse_run_config({"sample": sample, "min-nodes": 1}).sampled(clients)
    assert 1 <= number <= clients
    assert number == 1 or abs(number - sample * clients) <= 0.5
