"""Quantised checkpoints are rewritten with the bfloat16 weights that transformers computes with."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config
from transformers.models.deepseek_v3 import DeepseekV3Config

from finetuning.conversion.convert import convert
from finetuning.conversion.plan import ConversionError
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_checkpoint
from tests.finetuning.conftest import ROUTED, SIZES

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4}


@pytest.fixture(params=["mxfp4", "fp8", "fp8, one scale"])
def quantized(request, tmp_path) -> Path:
    """Write a random checkpoint with quantised weights."""
    mxfp4 = request.param == "mxfp4"
    if mxfp4:
        config = GptOssConfig(**SIZES | {"num_local_experts": 4, "intermediate_size": 32})
    else:
        config = DeepseekV3Config(**SIZES | ROUTED | LATENT)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "q")
    file, tensors = tmp_path / "q" / "model.safetensors", {}
    for name, value in load_file(tmp_path / "q" / "model.safetensors").items():
        if mxfp4 and name.endswith("_proj"):
            rows, columns = value.shape[-1], value.shape[-2]
            shape = (4, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 130, shape, dtype=torch.uint8)
        elif not mxfp4 and name.endswith("_proj.weight"):
            grid = [] if "scale" in request.param else [side // 8 for side in value.shape]
            tensors[name] = (8 * value).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".weight_scale_inv")] = torch.rand(grid)
        else:
            tensors[name] = value
    save_file(tensors, file, metadata={"format": "pt"})
    how = {"quant_method": "mxfp4"} if mxfp4 else {"quant_method": "fp8"}
    how |= {} if mxfp4 else {"weight_block_size": None if "scale" in request.param else [8, 8]}
    content = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(content | {"quantization_config": how}))
    return tmp_path / "q"


def test_the_weights_are_those_that_transformers_computes_with(quantized, tmp_path):
    with pytest.raises(BaseModelError, match=f"in bfloat16 with: chambers convert {quantized} FOL"):
        load_checkpoint(quantized)
    assert convert(quantized, tmp_path / "plain", shard_bytes=20_000).startswith("weights in bfloa")
    method = json.loads((quantized / "config.json").read_text())["quantization_config"]
    how = Mxfp4Config if method["quant_method"] == "mxfp4" else FineGrainedFP8Config
    expected = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.bfloat16, quantization_config=how(dequantize=True)
    ).state_dict()
    found = load_checkpoint(tmp_path / "plain", dtype="auto").state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert len(list((tmp_path / "plain").glob("model-*.safetensors"))) > 1


def test_a_scale_that_is_missing_is_named(quantized, tmp_path):
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if "scale" in name)
    save_file({name: value for name, value in tensors.items() if name != gone}, file)
    with pytest.raises(ConversionError, match=f"lacks {gone}; download it again"):
        convert(quantized, tmp_path / "plain")
    shutil.rmtree(quantized)
    assert not any(tmp_path.iterdir())


def test_blocks_at_an_edge_may_be_smaller(tmp_path):
    (tmp_path / "q").mkdir()
    how = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    (tmp_path / "q" / "config.json").write_text(json.dumps({"quantization_config": how}))
    weight, scale, one = torch.randn(3, 5).to(torch.float8_e4m3fn), torch.rand(2, 3), torch.ones(())
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.activation_scale": one}
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    convert(tmp_path / "q", tmp_path / "plain")
    (found,) = load_file(tmp_path / "plain" / "model.safetensors").values()
    for row, column in ((0, 0), (1, 3), (2, 4)):
        expected = weight[row, column].float() * scale[row // 2, column // 2]
        assert found[row, column] == expected.bfloat16()
