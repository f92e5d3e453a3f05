"""Adapters of other tools: read as PEFT reads them, or refused by the key that isn't supported."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import AdapterError, read_adapter

PLAIN = {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def write(checkpoint, tmp_path):
    """Return a function that writes an adapter as PEFT does."""

    def written(**changes):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        options = {"init_lora_weights": False, "task_type": "CAUSAL_LM", **PLAIN, **changes}
        get_peft_model(model, LoraConfig(**options)).save_pretrained(tmp_path)
        return tmp_path

    return written


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"lora_alpha": 8.5},
        {"target_modules": r".*\.1\.self_attn\.(q|v)_proj"},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear", "init_lora_weights": "orthogonal", "r": 4},
    ],
    ids=str,
)
def test_an_adapter_has_the_effect_that_it_has_in_peft(checkpoint, write, changes):
    folder, tokens = write(**changes), torch.arange(2, 20)[None]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), folder)
    adapter = read_adapter(folder)
    ours = attach_adapter(AutoModelForCausalLM.from_pretrained(checkpoint), adapter.settings, None)
    load_adapter(ours, adapter.state)
    logits = [model.eval()(tokens).logits for model in (ours, theirs)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("use_dora", True, "DoRA"),
        ("init_lora_weights", "pissa_niter_4", "changes the base model's weights"),
        ("init_lora_weights", "olora", "changes the base model's weights"),
        ("init_lora_weights", "eva", "private text"),
        ("bias", "lora_only", "biases stay"),
        ("modules_to_save", ["lm_head"], "whole matrices"),
        ("rank_pattern", {"q_proj": 2}, "wrong scale"),
        ("target_parameters", ["experts.down_proj"], "experts"),
        ("layer_replication", [[0, 2]], "number of blocks"),
        ("use_qalora", True, "not supported; only plain LoRA"),
        ("a_feature_of_2027", {"on": True}, "not supported; only plain LoRA"),
        ("lora_alpha", -1, "greater than 0"),
        ("lora_alpha", "much", "valid number"),
        ("r", 2.5, "valid integer"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_features_are_refused_by_their_key(write, key, value, reason):
    file = write() / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(AdapterError, match=reason) as caught:
        read_adapter(file.parent)
    assert f"{key} = {value!r}" in str(caught.value) and "\n" not in str(caught.value)
