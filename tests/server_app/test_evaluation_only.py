"""Runs with ``rounds = 0``: the base model or an adapter is evaluated on held-out rows."""

import pytest
import torch
from safetensors.torch import load_file

from federation.run_config import ConfigError, parse_run_config
from finetuning.adapters.saved import AdapterError
from tests.in_process import run_in_process


def losses(journal, model):
    events = [e for e in journal.events if e["event"] == "evaluate" and e["model"] == model]
    return {e["client"]: (e["loss"], e["target_tokens"]) for e in events}


def mean(by_client):
    targets = sum(count for _, count in by_client.values())
    return sum(loss * count for loss, count in by_client.values()) / targets


@pytest.fixture
def base(values, deep_checkpoint):
    return values | {"strategy": "fedjudge-base", "model.name": str(deep_checkpoint)}


@pytest.fixture
def center(base, tmp_path):
    """Train one client on all clients' rows; return the journal and the adapter's folder."""
    changes = {"rounds": 1, "min-nodes": 1, "data.pool": "*"}
    journal = run_in_process(base | changes, tmp_path / "center", 1)
    return journal, tmp_path / "center" / "bench" / "center" / "adapters" / "global"


@pytest.mark.parametrize("strategy", ["fedjudge-base", "fl-glm"])
def test_a_center_adapter_is_evaluated_on_rows_of_each_client(base, center, tmp_path, strategy):
    trained, folder = center
    assert [e["examples"] for e in trained.events if e["event"] == "train"] == [24 + 12 + 8]
    own = base | {"strategy": strategy, "split.wire-dtype": "float32"}
    own |= {"rounds": 0, "initial-adapter": str(folder)}
    journal = run_in_process(own, tmp_path / "evaluated", 3)
    assert not [e for e in journal.events if e["event"] in ("train", "round")]
    for model in ("base", "global"):
        by_client = losses(journal, model)
        assert by_client.keys() == {"alpha", "beta", "gamma"}
        (pooled, _) = losses(trained, model)["center"]
        assert mean(by_client) == pytest.approx(pooled, rel=1e-5)
    assert mean(losses(journal, "global")) < mean(losses(journal, "base"))
    state = load_file(folder / "adapter_model.safetensors")
    assert state.keys() == journal.adapters[0].keys()
    assert all(torch.equal(value, journal.adapters[0][name]) for name, value in state.items())


def test_the_bare_model_is_evaluated_and_nothing_is_kept(values, tmp_path):
    journal = run_in_process(values | {"rounds": 0}, tmp_path / "state", 3)
    assert {e["model"] for e in journal.events if e["event"] == "evaluate"} == {"base"}
    assert not (tmp_path / "state").exists()


def test_an_adapter_that_does_not_fit_is_refused(base, center, tmp_path):
    for changes, reason in (
        ({"adapter.rank": 8}, r"has rank 4, but adapter\.rank = 8"),
        ({"adapter.alpha": 32}, r"has alpha 16.0, but adapter\.alpha = 32"),
        ({"adapter.kind": "prefix"}, r"has kind lora, but adapter\.kind = prefix"),
        ({"adapter.targets": "o_proj"}, r"doesn't fit: .*o_proj"),
        ({"initial-adapter": str(tmp_path)}, "is not an adapter's folder"),
    ):
        own = base | {"rounds": 0, "initial-adapter": str(center[1])} | changes
        with pytest.raises(AdapterError, match=reason):
            run_in_process(own, tmp_path / "evaluated", 3)


def test_one_client_of_several_needs_min_nodes_1():
    with pytest.raises(ConfigError, match="min-nodes is 2; set min-nodes to 1"):
        parse_run_config({"data.pool": "*"})
