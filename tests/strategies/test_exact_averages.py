"""With one trained LoRA matrix, the averaged model is the weighted mean of the clients' models."""

import pytest
import torch

from federation.messages import ARRAYS
from finetuning.aggregation.robust_aggregation import distance
from tests.in_process import MemoryJournal
from tests.marks import nightly
from tests.server_app.runs import events, final, folders, run, serve
from tests.strategies.grids import SpyingGrid, same, start

SIZES = {"alpha": 24, "beta": 12, "gamma": 8}


def products(state):
    """Return B·A of each adapted module."""
    names = [name for name in state if ".lora_B." in name]
    return {n: state[n] @ state[n.replace(".lora_B.", ".lora_A.")] for n in names}


@pytest.mark.parametrize("trained", ["b", "alternating", "both"])
def test_the_average_of_models(values, tmp_path, trained):
    values |= {"state-path": str(tmp_path), "strategy": "fedjudge-base"}
    values |= {"adapter.trained": trained, "train.learning-rate": 2e-2}
    grid, journal = SpyingGrid(values), MemoryJournal()
    start(values, grid, journal)
    errors = []
    for number, adapters in journal.personalised_by_round.items():
        averaged = products(journal.adapters[number])
        for name, product in averaged.items():
            mean = sum(SIZES[c] / 44 * products(a)[name].double() for c, a in adapters.items())
            errors.append(float((product - mean).abs().max()))
    known = [event["error"] for event in journal.events if event["event"] == "factors"]
    replies = [r for r in grid.received if r.metadata.message_type == "train"]
    sent = [set(reply.content[ARRAYS]) for reply in replies]
    if trained == "both":
        assert max(errors) > 1e-4
        assert len(known) == 3 and max(known) > 0.01
        return
    assert max(errors) <= 1e-6 and not known
    odd, even = sent[0], sent[3]
    assert all(".lora_B." in name for name in odd)
    assert all((".lora_A." if trained == "alternating" else ".lora_B.") in name for name in even)
    if trained == "b":
        first, last = (journal.adapters[number] for number in (1, 3))
        assert all(torch.equal(first[n], last[n]) for n in first if ".lora_A." in n)


ALTERNATING = {
    "adapter.trained": "alternating",
    "train.optimizer-state": "keep",
    "continual.share": 0.2,
}


@pytest.mark.parametrize("stop", [(2, True), nightly((1, False))], ids=str)
def test_resumed_equals_unbroken(values, tmp_path, stop):
    values |= ALTERNATING | {"server.update": "momentum", "rounds": 4}
    here, there = folders(tmp_path / "a"), folders(tmp_path / "b")
    unbroken = run(values | here)
    broken = run(values | there, stop_after=stop)
    assert run(values | there | {"resume": str(broken)}) == broken
    assert same(final(unbroken), final(broken))
    assert events(unbroken) == events(broken)


@pytest.mark.parametrize("trained", ["b", nightly("alternating")], ids=str)
def test_masked_sums_of_one_matrix(values, tmp_path, trained):
    values |= {"adapter.trained": trained}
    plain = final(serve(values | folders(tmp_path / "plain")))
    masked = final(serve(values | folders(tmp_path / "masked") | {"sums.enabled": True}))
    plain = {name: value for name, value in plain.items() if name in masked}
    zero = {name: 0 * value for name, value in plain.items()}
    assert distance(plain, masked) <= 1e-6 * distance(plain, zero)
