"""Both methods give the same float32 results on two fake devices, or real GPUs, as on the CPU.

Models, adapters, optimizers and lanes are real. These tests run each path to and from a device
once; tests of single functions are elsewhere.
"""

import math
import socket
from threading import Thread

import numpy as np
import pytest
import torch

from chambers.superlink import free_port
from finetuning.adapters.adapter import (
    attach_adapter,
    export_adapter,
    load_adapter,
    load_state,
    trainable_parameters,
)
from finetuning.data.candidates import Continuation
from finetuning.evaluation.held_out import held_out_loss
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.model.base_model import load_base_model
from finetuning.settings import ModelSettings
from finetuning.training.continual import ContinualPenalty, importance
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import Noise, PrivateGradients
from finetuning.training.proximal import ProximalPenalty
from finetuning.whole_model import WholeModel
from split.model.adapters import join_adapters, take_apart
from split.model.key_values import KeyValues
from split.model.partition import partition_of
from split.protocol.frames import Padding
from split.server.body import load_body
from split.server.stage import serve_stage
from tests.split import clients
from tests.split.clients import (
    ADAPTER,
    MODEL,
    Client,
    draw,
    serving,
    split_settings,
    train_together,
)
from tests.split.model.test_prefixes import PREFIX, random_prefix
from tests.split.server.test_stages import make_key
from tests.waiting import wait_until

pytestmark = pytest.mark.accelerator

STEPS = 3
TRAIN = clients.TRAIN.model_copy(update={"optimizer_state": "keep"})
SIZES = {"alpha": 9, "beta": 6}


def assert_equal(found: dict, expected: dict, tolerance: float) -> None:
    """Compare results by name, all on the CPU."""
    assert found.keys() == expected.keys()
    different = [
        name
        for name, value in expected.items()
        if not torch.allclose(
            *map(torch.as_tensor, (found[name], value)), rtol=tolerance, atol=tolerance
        )
    ]
    assert not different


def evaluated(model) -> dict:
    """Return a model's held-out loss, a greedy text, and log-probabilities of candidates."""
    tokens = torch.tensor([[0, 0, 7, 9, 11], [3, 5, 7, 9, 11]])
    texts = model.generate(tokens, (tokens > 0).long(), 6, do_sample=False, pad_token_id=0)
    groups = [
        [
            Continuation(torch.arange(2, 2 + n), torch.tensor(answer))
            for answer in ([4, 8], [5, 6, 7])
        ]
        for n in (3, 5)
    ]
    found = log_probabilities(model, groups, padding=0, max_tokens=60)
    return {
        "held-out loss": held_out_loss(model, draw(5, 9), 0, 2).loss,
        "texts": texts,
        "log-probabilities": [each.log_probability for group in found for each in group],
    }


def train_whole(base, kind, state, draws_as_cpu, devices="first") -> dict:
    """Train a whole model for two rounds; return losses, weights, optimizer and evaluation."""
    settings = ModelSettings(
        name=str(base),
        dtype="float32",
        gradient_checkpointing=kind == "checkpointing",
        devices=devices,
    )
    adapter = PREFIX if kind == "prefix" else ADAPTER
    # A second device has a random generator of its own, and draws other numbers than the CPU.
    if kind == "checkpointing" and draws_as_cpu and devices == "first":
        adapter = ADAPTER.model_copy(update={"dropout": 0.3})
    model = load_base_model(settings).model
    peft_model = attach_adapter(model, adapter, "base")
    load_adapter(peft_model, state)
    whole = WholeModel(peft_model)
    parameters = trainable_parameters(peft_model)
    examples = draw(12, 1)
    anchor = {name: p.detach().cpu() + 0.1 for name, p in parameters.items()}
    rows = [clients.collate([example], 0) for example in examples[:3]]
    stages, penalty = whole, None
    if kind == "continual":
        weights = importance(whole, rows)
        penalty = ContinualPenalty(
            parameters, anchor, {n: w.cpu() for n, w in weights.items()}, 0.1, share=0.1
        )
    elif kind == "proximal":
        penalty = ProximalPenalty(parameters, anchor, 0.1)
    elif kind == "private":
        random_bytes = np.random.default_rng(0).bytes
        stages = PrivateGradients(whole, parameters, Noise(0.5, 1.0, 4.0), lambda _: random_bytes)
    losses, optimizer = [], None
    for finished in range(2):
        steps = [range(6), range(6, 12), range(3, 9)]
        local_round = LocalRound(steps, finished * STEPS, 2 * STEPS, finished, math.inf)
        report, optimizer = train_round(
            stages, parameters, examples, 0, local_round, TRAIN, penalty, optimizer
        )
        losses += report.losses
    adapter = export_adapter(peft_model)
    return {"losses": losses} | adapter | optimizer | evaluated(whole)


@pytest.mark.parametrize("devices", ["first", "all"])
@pytest.mark.parametrize(
    "kind", ["base", "continual", "proximal", "private", "checkpointing", "prefix"]
)
def test_a_whole_model(any_device, base, beginning, kind, devices):
    device, state = any_device, random_prefix(base) if kind == "prefix" else beginning
    device.peak(1)
    before = device.peak(1)  # what is in use now
    found = train_whole(base, kind, state, device.draws_as_cpu, devices)
    assert device.peak(0) > 10_000, "the model was on the device"
    assert (device.peak(1) > before + 10_000) == (devices == "all")
    with device.absent():
        expected = train_whole(base, kind, state, device.draws_as_cpu, devices)
    assert_equal(found, expected, device.tolerance)


def test_mixed_precision(any_device, base, beginning):
    """The inputs of LoRA are bfloat16; by default, PEFT would convert them to float32."""
    model = load_base_model(ModelSettings(name=str(base), dtype="bfloat16")).model
    peft_model = attach_adapter(model, ADAPTER, "base")
    load_adapter(peft_model, beginning)
    types = set()
    for name, module in peft_model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _, given: types.add(given[0].dtype))
    whole, parameters = WholeModel(peft_model), trainable_parameters(peft_model)
    local_round = LocalRound([range(6)], 0, 1, 0, math.inf)
    train_round(whole, parameters, draw(6, 1), 0, local_round, TRAIN)
    found = evaluated(whole)
    assert types == {torch.bfloat16}
    assert math.isfinite(found["held-out loss"])
    assert all(map(math.isfinite, found["log-probabilities"]))


def train_split(base, adapter, state, **settings) -> dict:
    """Train two clients of a split model; return losses, weights, optimizers and evaluation."""
    split = split_settings(window=2, **settings)
    checkpointing = split.schedule == "serial" and adapter.kind == "lora"
    named = {"gradient_checkpointing": checkpointing, "name": str(base)}
    model = MODEL.model_copy(update=named)
    parts = take_apart(state, partition_of(base, split))
    own = parts["head"] | parts["tail"]
    clients.load_ends.cache_clear()  # they are on the devices of the last run
    members = {name: Client(name, base, split, adapter, model) for name in SIZES}
    results: dict = {}
    with serving(base, state, split, adapter, TRAIN, len(SIZES), model=model) as server:
        server.begin_round(SIZES, 0, own)
        if split.schedule == "serial":
            trained = {}
            for name, member in members.items():
                trained[name] = member.train(server, own, STEPS, TRAIN)
                assert not server.finish_lanes()[0].error
        else:
            steps, trains = dict.fromkeys(SIZES, STEPS), dict.fromkeys(SIZES, TRAIN)
            trained = train_together(list(members.values()), server, own, steps, trains)
            assert not any(account.error for account in server.finish_lanes())
        body = server.end_round(SIZES)
        results |= server.export_optimizers()
        server.load_optimizers(server.export_optimizers())
        for name, member in members.items():
            results[f"{name}: losses"] = member.losses
            results |= {f"{name}: {n}": value for n, value in member.optimizer.items()}
            whole = join_adapters([trained[name], body])
            results |= {f"{name}: {n}": value for n, value in whole.items()}
        if split.body_hosts:  # they have no caches
            return results
        models = {"global": body, "base": None}
        with members["alpha"].lane(server.invite_to_evaluate("alpha", 1, models, 60)) as chosen:
            for name, adapters in models.items():
                chosen.choose(name, None if adapters is None else trained["alpha"])
                results |= {f"{name}: {n}": value for n, value in evaluated(chosen).items()}
            chosen.end()
    return results


def last_devices(device, count) -> str:
    """Return the names of the last devices, for ``split.body-devices``."""
    if device.devices < count:
        pytest.skip(f"this machine has {device.devices} GPUs")
    return ",".join(f"cuda:{n}" for n in range(device.devices - count, device.devices))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "kind"),
    [("serial", "lora"), ("client-batch", "lora"), ("hierarchical", "lora"), ("serial", "prefix")],
)
def test_a_split_model(any_device, base, beginning, schedule, kind, devices):
    device, adapter, state = any_device, ADAPTER, beginning
    if kind == "prefix":
        adapter, state = PREFIX, random_prefix(base)
    settings = {"schedule": schedule, "average_every": 2 if schedule == "hierarchical" else 0}
    names = last_devices(device, devices)
    found = train_split(base, adapter, state, body_devices=names, **settings)
    assert device.peak(device.devices - 1) > 10_000, "the body was on the last device"
    with device.absent():
        expected = train_split(base, adapter, state, **settings)
    assert_equal(found, expected, device.tolerance)


def test_noise_on_hidden_states(any_device, base, beginning):
    """The noise is secret, so results can't be compared; they must only be finite."""
    split = split_settings(body_devices=last_devices(any_device, 1))
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        client = Client("alpha", base, split, noise=0.1)
        client.train(server, beginning, steps=1)
        (account,) = server.finish_lanes()
    assert not account.error and math.isfinite(client.losses[0])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_split_model_in_stages(any_device, base, beginning, tmp_path):
    key, adapter = make_key(tmp_path), ADAPTER.model_copy(update={"dropout": 0.0})
    ports = free_port(), free_port()
    for port in ports:
        Thread(target=serve_stage, args=(f"127.0.0.1:{port}", key), daemon=True).start()
        wait_until(lambda port=port: is_open(port))
    hosts = {"body_hosts": ",".join(f"127.0.0.1:{port}" for port in ports), "body_key": str(key)}
    names = last_devices(any_device, 1)
    found = train_split(base, adapter, beginning, body_devices=names, **hosts)
    with any_device.absent():
        expected = train_split(base, adapter, beginning)
    assert_equal(found, {name: expected[name] for name in found}, any_device.tolerance)


def test_texts_of_split_lanes_in_one_pass(any_device, base, beginning):
    state = take_apart(beginning, partition_of(base, split_settings()))["body"]
    prompts = [torch.randn(1, 5, 32), torch.randn(2, 4, 32)]
    tokens = [torch.randn(1, 1, 32), torch.randn(2, 1, 32)]

    def outputs(devices: str) -> list[torch.Tensor]:
        body = load_body(base, MODEL, split_settings(body_devices=devices))
        body.attach(ADAPTER, "a")
        load_state(body.trainable("a"), state)
        body.train(False)
        texts = []
        with torch.no_grad():
            for name, prompt in zip(("a", None), prompts, strict=True):
                rows, columns, _ = prompt.shape
                body.use(name)
                texts.append(
                    KeyValues(body, Padding("left", torch.full((rows,), columns)), columns)
                )
                texts[-1].extend(prompt)
            with body.using_together(["a", None], [1, 2]):
                found = KeyValues.extend_together(texts, tokens)
            found.append(body(prompts[1], Padding("left", torch.tensor([4, 2]))))
            return [each.cpu() for each in found]

    found = outputs(last_devices(any_device, 1))
    with any_device.absent():
        expected = outputs("")
    assert_equal(dict(enumerate(found)), dict(enumerate(expected)), any_device.tolerance)
