"""Adapters: attached, exchanged, and read back by PEFT alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from finetuning.adapters.adapter import (
    attach_adapter,
    export_adapter,
    exported_names,
    initial_adapter,
    load_adapter,
    save_adapter,
    trainable_parameters,
)
from finetuning.adapters.model_card import model_card
from finetuning.errors import BaseModelError
from finetuning.settings import AdapterSettings
from tests.marks import nightly

SETTINGS = AdapterSettings(rank=3, alpha=6, targets="q_proj, v_proj")
PREFIX = AdapterSettings(kind="prefix", prefix_length=5)


def test_only_the_adapter_is_trained_and_in_float32(base):
    model = attach_adapter(base.model.to(torch.bfloat16), SETTINGS, base.reference)
    parameters = trainable_parameters(model)
    assert len(parameters) == 2 * 2 * 2  # blocks, targets, matrices
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in parameters.items())


def test_exported_tensors_are_equal_and_share_no_storage(adapted):
    model = adapted()
    state = export_adapter(model)
    before = {name: value.clone() for name, value in state.items()}
    storages = [value.untyped_storage().data_ptr() for value in state.values()]
    storages += [p.untyped_storage().data_ptr() for p in trainable_parameters(model).values()]
    assert len(set(storages)) == len(storages)
    other = adapted(seed=1)
    load_adapter(other, state)
    again = export_adapter(other)
    assert list(again) == list(state) == sorted(exported_names(model).values())
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    for parameter in [*trainable_parameters(model).values(), *trainable_parameters(other).values()]:
        parameter.data += 1
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_the_initial_adapter_fits_and_changes_nothing(base):
    state, config = initial_adapter(str(base.directory), SETTINGS, seed=1)
    tokens = torch.arange(2, 12)[None]
    before = base.model(tokens).logits
    model = attach_adapter(base.model, SETTINGS, base.reference)
    ours = export_adapter(model)
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in ours.items()}
    assert all(v.dtype == torch.float32 and v.device.type == "cpu" for v in state.values())
    assert all(value.any() == ("lora_A" in name) for name, value in state.items())
    load_adapter(model, state)
    assert torch.equal(model(tokens).logits, before)
    assert set(config.target_modules) == {"q_proj", "v_proj"}
    assert (config.r, config.lora_alpha) == (3, 6)
    assert config.base_model_name_or_path == base.reference == base.directory.name


def test_the_initial_adapter_is_decided_by_its_seed(checkpoint):
    torch.manual_seed(1)
    first, _ = initial_adapter(str(checkpoint), SETTINGS, seed=1)
    torch.manual_seed(2)
    drawn = torch.rand(3)
    torch.manual_seed(2)
    again, _ = initial_adapter(str(checkpoint), SETTINGS, seed=1)
    assert torch.equal(torch.rand(3), drawn), "the global generator is unchanged"
    other, _ = initial_adapter(str(checkpoint), SETTINGS, seed=2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    random_halves = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in random_halves)
    assert not torch.equal(first[random_halves[0]], first[random_halves[1]])


def test_tensors_of_another_model_are_refused(adapted):
    model = adapted()
    state = export_adapter(model)
    name = next(iter(state))
    before = {n: v.clone() for n, v in state.items()}
    with pytest.raises(ValueError, match="differ from this model"):
        load_adapter(model, {n: v for n, v in state.items() if n != name})
    with pytest.raises(ValueError, match="foreign"):
        load_adapter(model, state | {"foreign.weight": torch.zeros(1)})
    # A shape that could be broadcast is refused, too.
    last = list(state)[-1]
    with pytest.raises(ValueError, match=r"has shape \(1, 1\)"):
        load_adapter(model, {n: v + 1 for n, v in state.items()} | {last: torch.zeros(1, 1)})
    after = export_adapter(model)
    assert all(torch.equal(value, after[n]) for n, value in before.items()), "all or nothing"


def test_targets_that_do_not_fit_are_refused_by_name(base):
    settings = AdapterSettings(targets="query_key_value")
    with pytest.raises(BaseModelError, match=r"adapter\.targets = \"query_key_value\""):
        attach_adapter(base.model, settings, base.reference)
    with pytest.raises(BaseModelError, match=r"adapter\.targets = \"query_key_value\""):
        initial_adapter(str(base.directory), settings, seed=0)


READS_IT_BACK = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base, adapter, out = sys.argv[1:]
beside, own = (AutoTokenizer.from_pretrained(each) for each in (adapter, base))
assert beside.get_vocab() == own.get_vocab()
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
torch.save(model(torch.arange(2, 40)[None]).logits.detach(), out)
ours = {"finetuning", "federation", "strategies", "client_app", "server_app", "split", "bench"}
assert not ours & {name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, nightly(PREFIX)], ids=["lora", "prefix"])
def test_a_saved_adapter_is_read_by_peft_alone(base, tmp_path, settings):
    state, config = initial_adapter(str(base.directory), settings, seed=0)
    torch.manual_seed(0)
    state = {name: torch.randn_like(value) for name, value in state.items()}
    model = attach_adapter(base.model, settings, base.reference)
    load_adapter(model, state)
    ours = model.eval()(torch.arange(2, 40)[None]).logits
    with model.disable_adapter():
        assert not torch.allclose(model(torch.arange(2, 40)[None]).logits, ours, atol=1e-2)

    save_adapter(tmp_path / "adapter", {}, config, "an older one")
    save_adapter(tmp_path / "adapter", state, config, "# A card\n", base.directory)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    files = [str(base.directory), str(tmp_path / "adapter"), str(tmp_path / "logits.pt")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        [sys.executable, "-I", "-c", READS_IT_BACK, *files], cwd=elsewhere, check=True, timeout=120
    )
    theirs = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(theirs, ours.detach(), rtol=0, atol=1e-6)


def test_a_card_names_no_path_to_data():
    keys = ("data.path", "output-dir", "state-path", "resume", "model.name")
    paths = {key: f"/private/{key}" for key in keys}
    card = model_card(
        title="Global adapter",
        base="owner/model",
        directory=Path("/private/models--owner--model"),
        clients=3,
        rounds=3,
        kind="prefix",
        config={**paths, "train.epochs": 2},
    )
    assert "/private" not in card
    for line in ("base_model: owner/model", "- Clients: 3", "train.epochs = 2"):
        assert line in card.splitlines()
    assert "prefix-tuning" in card
