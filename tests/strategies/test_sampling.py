"""Rounds with a sample of the clients."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from federation.run_config import parse_run_config
from strategies.participants import RefusedError
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


@pytest.fixture
def many(values, client_folders, tmp_path):
    """A run config with 200 clients, of which four are drawn for each round."""
    folder = tmp_path / "clients"
    for number in range(200):
        shutil.copytree(client_folders / "gamma", folder / f"client-{number:03}")
    changed = {"sample": 0.02, "min-nodes": 1, "rounds": 2, "train.local-steps": 1}
    return values | changed | {"data.path": str(folder)}


def spoil(values, name):
    (Path(values["data.path"]) / name / "train.jsonl").write_text("no row\n")


def outline(journal):
    """Return the events without durations, and the final adapter as bytes."""
    kept = [{k: v for k, v in event.items() if "seconds" not in k} for event in journal.events]
    return kept, save(journal.adapters[2])


@pytest.mark.slow
def test_rows_of_clients_that_are_not_drawn_are_not_read(many, tmp_path):
    once = run_in_process(many, tmp_path / "a", 200)
    drawn = {event["client"] for event in once.events if "client" in event}
    assert 4 < len(drawn) <= 12
    for number in range(200):
        if (name := f"client-{number:03}") not in drawn:
            spoil(many, name)
    assert outline(run_in_process(many, tmp_path / "b", 200)) == outline(once)


@pytest.mark.slow
def test_a_drawn_client_with_bad_rows_is_left_out_by_name(many, tmp_path):
    once = run_in_process(many, tmp_path / "a", 200)
    asked = [event["client"] for event in events(once, "evaluate")]
    *good, bad = [n for n in events(once, "round")[1]["participants"] if n not in asked]
    spoil(many, bad)
    second = events(run_in_process(many, tmp_path / "b", 200), "round")[1]
    ((client, reason),) = [each.values() for each in second["left_out"]]
    assert client == bad and "train.jsonl:1: not JSON" in reason
    assert {*good} <= {*second["participants"]} and len(second["participants"]) == 3
    spoil(many, asked[0])
    with pytest.raises(RefusedError, match=f"training can't start:\n  {asked[0]}: "):
        run_in_process(many, tmp_path / "c", 200)


@given(clients=st.integers(1, 10_000), sample=st.floats(1e-6, 1.0))
def test_a_sample_has_its_share_and_at_least_one(clients, sample):
    number = parse_run_config({"sample": sample, "min-nodes": 1}).sampled(clients)
    assert 1 <= number <= clients
    assert number == 1 or abs(number - sample * clients) <= 0.5
