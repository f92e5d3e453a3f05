"""Gradient checkpointing changes no loss, gradient or weight, with dropout in every block."""

import pytest
import torch

from finetuning.settings import ModelSettings
from tests.marks import nightly
from tests.split.bodies import DROPOUT, load_body, train_branches
from tests.split.clients import Client, serving, split_settings, train_together


@pytest.mark.parametrize("dtype", ["float32", nightly("bfloat16")])
@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_branches_in_turn(random_checkpoint, quantization, dtype):
    directory = random_checkpoint(num_hidden_layers=6, hidden_size=64)
    results = []
    for checkpointing in (False, True):
        body, calls = load_body(directory, quantization, checkpointing, dtype), []
        module = body.model.get_submodule("model.layers.2.mlp")
        module.register_forward_pre_hook(lambda *given, calls=calls: calls.append(given))
        results.append(train_branches(body, DROPOUT))
        assert len(calls) == 4 * (1 + checkpointing), "two steps of two branches"
    assert results[0][0].dtype == getattr(torch, dtype)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", ["client-batch", nightly("hierarchical")])
def test_all_parties_over_lanes(base, beginning, schedule):
    split, names, results = split_settings(schedule=schedule), ["alpha", "beta"], []
    for checkpointing in (False, True):
        model = ModelSettings(gradient_checkpointing=checkpointing)
        with serving(base, beginning, split, DROPOUT, minimum=2, model=model) as server:
            server.begin_round(dict.fromkeys(names, 1.0), 0)
            clients = [Client(name, base, split, DROPOUT, model) for name in names]
            ends = train_together(clients, server, beginning, dict.fromkeys(names, 4))
            server.finish_lanes()
            bodies = [server.state_of(name) for name in names]
        losses = [client.losses for client in clients]
        results.append((losses, [ends[name] for name in names], bodies))
    (losses, ends, bodies), others = results[0], results[1]
    assert losses == others[0]
    for one, other in zip([*ends, *bodies], [*others[1], *others[2]], strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
