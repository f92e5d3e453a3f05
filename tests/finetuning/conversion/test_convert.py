"""Converted checkpoints compute the same as the originals, according to their descriptions."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetuning.conversion.convert import convert
from finetuning.conversion.plan import ConversionError
from finetuning.model.base_model import load_base_model
from finetuning.settings import ModelSettings
from tests.finetuning.conversion.originals import (
    BAICHUAN,
    CHATGLM,
    baichuan_logits,
    baichuan_shapes,
    chatglm_logits,
    chatglm_shapes,
    draw,
    write,
)

IDS = np.array([1, 17, 93, 400, 17, 5, 212, 639, 3, 3, 88])


@pytest.fixture
def original(tmp_path, sentencepiece_model):
    """Return a function that writes a checkpoint, and returns its folder and tensors."""

    def make(config, dtype=torch.float32, files=2):
        shapes = baichuan_shapes if config["model_type"] == "baichuan" else chatglm_shapes
        tensors = {name: value.to(dtype) for name, value in draw(shapes(config)).items()}
        folder = write(tmp_path / "original", config, tensors, files)
        shutil.copy(sentencepiece_model(), folder / "tokenizer.model")
        (folder / "LICENSE").write_text("as is")
        return folder, tensors

    return make


def logits(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(IDS)[None]).logits[0].numpy(), model


# Norms and rotations are computed in float32 by transformers, whatever the precision.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.mark.parametrize("second", [False, True])
def test_baichuan_is_llama(original, tmp_path, second):
    config = BAICHUAN | ({"z_loss_weight": 0} if second else {})
    folder, tensors = original(config)
    what = convert(folder, tmp_path / "converted")
    found, model = logits(tmp_path / "converted")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert what == f"{'Baichuan2-7B' if second else 'Baichuan-7B'}, converted to LlamaForCausalLM"
    expected = baichuan_logits(tensors, config, IDS, normalised_head=second)
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert np.ptp(expected) > 1


@pytest.mark.parametrize("changes", [{}, {"rope_ratio": 50}])
def test_chatglm_is_glm(original, tmp_path, changes):
    config = CHATGLM | changes
    folder, tensors = original(config)
    convert(folder, tmp_path / "converted")
    found, model = logits(tmp_path / "converted")
    assert type(model).__name__ == "GlmForCausalLM"
    np.testing.assert_allclose(found, chatglm_logits(tensors, config, IDS), **CLOSE)


@pytest.mark.parametrize("form", ["torch, old", "torch", "safetensors"])
def test_files_of_any_format_convert_to_the_same_tensors(original, tmp_path, form):
    folder, tensors = original(CHATGLM, torch.float16, files=3)
    if form == "torch, old":
        for file in folder.glob("*.bin"):
            content = torch.load(file)
            torch.save(content, file, _use_new_zipfile_serialization=False)
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
        for file in folder.glob("*.bin"):
            file.write_bytes(b"not read")
    convert(folder, tmp_path / "converted", shard_bytes=40_000)
    files = sorted((tmp_path / "converted").glob("*.safetensors"))
    index = json.loads((tmp_path / "converted" / "model.safetensors.index.json").read_text())
    written = {}
    for file in files:
        own = load_file(file)
        assert len(own) == 1 or sum(value.nbytes for value in own.values()) <= 40_000
        assert all(index["weight_map"][name] == file.name for name in own)
        written |= own
    assert len(files) > 3
    assert {value.dtype for value in written.values()} == {torch.float16}
    source = tensors["transformer.encoder.layers.2.self_attention.query_key_value.bias"]
    parts = [written[f"model.layers.2.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert torch.equal(torch.cat(parts), source)
    assert not any(file.name.startswith(".") for file in tmp_path.iterdir())


def test_the_folder_is_a_base_model_and_says_where_it_comes_from(original, tmp_path):
    folder, _ = original(BAICHUAN, torch.bfloat16)
    convert(folder, tmp_path / "converted")
    base = load_base_model(ModelSettings(name=str(tmp_path / "converted"), dtype="float32"))
    assert base.tokenizer.chat_template is None
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert "auto_map" not in config
    assert config["dtype"] == "bfloat16"
    note = (tmp_path / "converted" / "README.md").read_text()
    assert "Baichuan-7B" in note
    assert "| pytorch_model-00001-of-00002.bin | `" in note
    assert (tmp_path / "converted" / "LICENSE").read_text() == "as is"


def test_generation_ends_where_turns_of_chatglm3_end(original, tmp_path):
    folder, _ = original(CHATGLM)
    convert(folder, tmp_path / "converted")
    base = load_base_model(ModelSettings(name=str(tmp_path / "converted"), dtype="float32"))
    ends = base.model.generation_config.eos_token_id
    assert base.tokenizer.convert_ids_to_tokens(ends) == ["</s>", "<|user|>", "<|observation|>"]


REFUSED = [
    ({k: v for k, v in BAICHUAN.items() if k != "max_position_embeddings"}, "Baichuan-13B.*ALiBi"),
    (BAICHUAN | {"model_type": "gpt2"}, "needs no conversion"),
    (BAICHUAN | {"model_type": "internlm"}, "internlm.*these can: Baichuan-7B"),
    (CHATGLM | {"position_encoding_2d": True}, r"ChatGLM-6B \(the first version\).*GLM-4-9B-hf"),
    (CHATGLM | {"padded_vocab_size": 151552}, "GLM-4-9B need not be converted"),
    (CHATGLM | {"quantization_bit": 4}, "quantization_bit = 4"),
    (CHATGLM | {"multi_query_attention": False}, "multi_query_attention = False"),
    (CHATGLM | {"_name_or_path": "mine"}, "add --chatglm-version 2 or 3"),
    (CHATGLM | {"_name_or_path": "chatglm2-6b", "rope_ratio": 16}, "interpolates positions"),
    (CHATGLM | {"num_layers": 3}, r"layers\.3.*does not fit config\.json"),
    (CHATGLM | {"num_layers": 5}, r"lacks model\.layers\.4"),
    (CHATGLM | {"multi_query_group_num": 3}, "has 80 rows; config.json requires 96"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_other_checkpoints_are_refused_by_name(tmp_path, sentencepiece_model, config, reason):
    tensors = draw(chatglm_shapes(CHATGLM))
    folder = write(tmp_path / "original", config, tensors)
    shutil.copy(sentencepiece_model(), folder / "tokenizer.model")
    with pytest.raises(ConversionError, match=reason):
        convert(folder, tmp_path / "converted")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


class _Code:
    """An object whose unpickling would write a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "lacks pytorch_model-00002-of-00002.bin"),
        (lambda file: file.write_text("version https://git-lfs\n"), "00002.bin can't be read.*LFS"),
        (lambda file: file.write_bytes(file.read_bytes()[:9000]), "00002.bin can't be read"),
        (
            lambda file: file.write_bytes(pickle.dumps(_Code(file.parent / "ran"), 2)),
            "00002.bin can't be read",
        ),
        (lambda file: torch.save({"a": [1]}, file), "a in .* is list; only float32"),
        (
            lambda file: torch.save({"a": torch.ones(2, dtype=torch.int8)}, file),
            "int8.*unquantised",
        ),
        (lambda file: torch.save({"bert.weight": torch.ones(2)}, file), "bert.weight is not one"),
    ],
)
def test_damaged_and_hostile_files_are_refused_and_never_run(original, tmp_path, damage, reason):
    folder, _ = original(BAICHUAN)
    damage(folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ConversionError, match=reason):
        convert(folder, tmp_path / "converted")
    assert not (folder / "ran").exists()
    assert not (tmp_path / "converted").exists()
