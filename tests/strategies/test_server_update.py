"""The server's update: as in Flower, one step per round, the same after a resumption."""

from pathlib import Path

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi

from federation.messages import from_arrays, to_arrays
from federation.run_config import ConfigError, parse_run_config
from federation.server_settings import ServerSettings
from strategies.server_update import server_update
from tests.in_process import MemoryJournal, run_in_process
from tests.server_app.test_resume import events, final, run
from tests.strategies.grids import same, start
from tests.strategies.test_late_replies import Late

UPDATES = {
    "momentum": (FedAvgM, {"server_learning_rate": 0.5, "server_momentum": 0.8}),
    "adam": (FedAdam, {"eta": 0.5, "beta_1": 0.8, "beta_2": 0.95}),
    "yogi": (FedYogi, {"eta": 0.5, "beta_1": 0.8, "beta_2": 0.95}),
}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 4, generator=generator) for name in ("a", "b")}


@pytest.mark.usefixtures("one_run")
@pytest.mark.parametrize("name", UPDATES)
def test_updates_equal_those_of_flower(name):
    kind, options = UPDATES[name]
    rates = {key: value for key, value in options.items() if key.startswith("beta")}
    settings = ServerSettings(update=name, learning_rate=0.5, **({"beta_1": 0.8} | rates))
    update = server_update(settings)
    theirs = kind(min_train_nodes=2, **options)
    ours, state, arrays = drawn(0), {}, to_arrays(drawn(0))
    for number in range(1, 5):
        replies = [drawn(10 * number), drawn(10 * number + 1)]
        mean = {key: (replies[0][key] + 3 * replies[1][key]) / 4 for key in ours}
        ours, state = update.apply(ours, mean, state)
        theirs.current_arrays = {k: array.numpy() for k, array in arrays.items()}
        if name == "momentum":
            theirs.current_arrays = arrays
        arrays, _ = theirs.aggregate_train(number, messages(replies))
        assert state
        for key, value in from_arrays(arrays).items():
            torch.testing.assert_close(ours[key], value.float(), rtol=1e-6, atol=1e-6)


def messages(states):
    for weight, state in zip((1, 3), states, strict=True):
        content = RecordDict(
            {"arrays": to_arrays(state), "metrics": MetricRecord({"num-examples": weight})}
        )
        yield Message(content, reply_to=Message(RecordDict(), 1, "train"))


@pytest.fixture
def settings(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "min-nodes": 2, "rounds": 2, "train.local-steps": 1}
    values |= {"server.update": "adam", "server.learning-rate": 0.01}
    return values | {"state-path": str(tmp_path / "state")}


def test_each_round_begins_with_the_state_of_the_last(settings):
    journal = run_in_process(settings, Path(settings["state-path"]), 3)
    update, state = server_update(parse_run_config(settings).server), {}
    adapter, shares = journal.adapters[0], {"alpha": 24 / 44, "beta": 12 / 44, "gamma": 8 / 44}
    for number, kept in sorted(journal.personalised_by_round.items()):
        mean = {k: sum(shares[name] * kept[name][k] for name in shares) for k in adapter}
        adapter, state = update.apply(adapter, mean, state)
        for key, value in adapter.items():
            torch.testing.assert_close(journal.adapters[number][key], value, rtol=0, atol=1e-5)
    assert number == 2


def test_an_average_with_late_replies_is_a_single_step(settings):
    settings |= {"late-replies": True}
    in_time, late = MemoryJournal(), MemoryJournal()
    start(settings, Late(settings, late=False), in_time)
    start(settings, Late(settings), late)
    assert any(event["event"] == "late" for event in late.events)
    assert same(late.adapters[2], in_time.adapters[2])
    assert same(late.progress.update, in_time.progress.update)


@pytest.mark.parametrize("stop", [(1, True), pytest.param((1, False), marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_state_of_the_update(settings, tmp_path, stop):
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(settings | here)
    broken = run(settings | there, stop)
    run(settings | there | {"resume": str(broken)})
    assert same(final(unbroken), final(broken))
    assert events(unbroken) == events(broken)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"server.update": "adam"}, "such as 0.01"),
        ({"server.learning-rate": 0.1}, "are not for server.update"),
        ({"server.update": "momentum", "server.beta-2": 0.5}, "server.beta-2 is not"),
        ({"strategy": "fl-glm", "server.update": "momentum"}, "averages its own adapters"),
    ],
)
def test_settings_without_effect_are_refused(values, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run_config(values)
