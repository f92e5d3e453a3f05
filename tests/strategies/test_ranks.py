"""A run with a rank for each client: what is sent, averaged, stored and refused."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from federation.messages import ARRAYS, from_arrays
from federation.run_config import ConfigError, parse_run_config
from finetuning.aggregation.mixed_ranks import average_ranks
from tests.in_process import MemoryJournal
from tests.server_app.runs import events, final, folders, run, serve
from tests.strategies.grids import SpyingGrid, same, start

SIZES = {"alpha": 24, "beta": 12, "gamma": 8}
RANKS = {"strategy": "fedjudge-base", "adapter.rank": 8, "adapter.ranks": "2, 8,4"}


def test_each_client_trains_at_its_rank(values, tmp_path):
    values |= RANKS | {"state-path": str(tmp_path)}
    grid, journal = SpyingGrid(values), MemoryJournal()
    start(values, grid, journal)
    trained = [r for r in grid.received if r.metadata.message_type == "train"]
    for number in range(3):
        replies = trained[3 * number : 3 * number + 3]
        states = {r.content["config"]["name"]: from_arrays(r.content[ARRAYS]) for r in replies}
        for name, rank in (("alpha", 2), ("beta", 8), ("gamma", 4)):
            assert all(rank in value.shape for value in states[name].values())
        if number:
            tensors = ((n, {c: s[n] for c, s in states.items()}) for n in sorted(states["beta"]))
            mean = average_ranks(tensors, SIZES, journal.adapters[number])
            assert same(mean, journal.adapters[number + 1])
    assert all(8 in value.shape for value in journal.kept["alpha"].values())


def test_the_results_are_of_the_largest_rank_and_resumable(values, tmp_path, checkpoint):
    values |= RANKS | {"rounds": 2}
    here, there = folders(tmp_path / "a"), folders(tmp_path / "b")
    unbroken = run(values | here)
    broken = run(values | there, stop_after=(1, True))
    assert run(values | there | {"resume": str(broken)}) == broken
    assert same(final(unbroken), final(broken))
    assert events(unbroken) == events(broken)
    # The personalised adapter at the coordinator computes what the client's own computes.
    (own,) = (tmp_path / "a-state").glob("*/alpha/adapters/personalised")
    tokens = torch.arange(12)[None] + 5
    outputs = []
    for folder in (own, unbroken / "adapters" / "clients" / "alpha"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        outputs.append(PeftModel.from_pretrained(model, folder)(tokens).logits)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strategy": "fedjudge-cl"}, "components of the adapters change"),
        ({"train.optimizer-state": "keep"}, "components of the adapters change"),
        ({"sums.enabled": True, "min-nodes": 3}, "components of the adapters change"),
        ({"strategy": "fl-glm"}, "adapters of one rank"),
        ({"adapter.ranks": "2,16"}, r"adapter.ranks contains 16; adapter.rank is 8"),
        ({"adapter.ranks": "0"}, "adapter.ranks"),
        ({"adapter.trained": "b"}, 'adapter.kind = "lora" with trained = "both"'),
    ],
)
def test_settings_that_ranks_exclude_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_run_config(RANKS | settings)


def test_a_site_names_its_rank(values, tmp_path, client_folders):
    del values["data.path"]
    values |= RANKS | {"adapter.ranks": "site", "rounds": 1, "min-nodes": 2}
    values |= folders(tmp_path / "runs")
    nodes = {
        number: {"name": name, "data-path": str(client_folders / name), **rank}
        for number, (name, rank) in enumerate(
            {"alpha": {"rank": 3}, "beta": {"rank": 8}, "gamma": {}}.items(), start=1
        )
    }
    grid = SpyingGrid(values, nodes={n: nodes[n] for n in (1, 2)})
    serve(values, grid)
    replies = [r for r in grid.received if r.metadata.message_type == "train"]
    assert {min(a.shape) for r in replies for a in r.content[ARRAYS].values()} == {3, 8}
    with pytest.raises(Exception, match=r"needs a rank up to adapter\.rank = 8 in the site"):
        serve(values, SpyingGrid(values, nodes=nodes))
