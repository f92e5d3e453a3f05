"""Head, body and tail together compute exactly the whole model, or the model is refused."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model
from finetuning.settings import ModelSettings
from split.model.exactness import check_exactness
from split.model.loading import load_parts, tensors_of
from split.model.partition import (
    PARTIES,
    Partition,
    partition_of,
)
from split.protocol.frames import Padding
from split.settings import SplitSettings
from tests.marks import nightly
from tests.split.conftest import (
    ARCHITECTURES,
    LENGTHS,
    draw_tokens,
    load_all,
    split_logits,
    whole_logits,
    whole_model,
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
# Bodies that begin at the first block and at an even one; the night adds an odd one.
@pytest.mark.parametrize("cuts", [((0, 0), (2, 1)), nightly(((1, 1),))], ids=str)
def test_the_parts_compute_what_the_whole_model_does_bit_for_bit(
    architecture, cuts, random_checkpoint
):
    directory = random_checkpoint(architecture)
    whole, tokens = whole_model(directory), draw_tokens()
    for head, tail in cuts:
        parts = load_all(directory, head, tail)
        for attention in ("sdpa", "eager"):
            if attention == "sdpa" and not whole._supports_sdpa:
                continue
            for model in (whole, *(part.model for part in parts.values())):
                model.set_attn_implementation(attention)
            for side in ("right", "left"):
                with torch.no_grad():
                    expected = whole_logits(whole, tokens, side)
                    given = split_logits(parts, tokens, side)
                assert torch.equal(expected, given), (head, tail, attention, side)


def test_the_cut_is_made_as_the_settings_say(random_checkpoint):
    directory = random_checkpoint()
    partition = partition_of(directory, SplitSettings(head_blocks=1, tail_blocks=2))
    assert partition == Partition(4, 1, 2)
    assert [list(partition.range_of(party)) for party in PARTIES] == [[0], [1], [2, 3]]
    with pytest.raises(BaseModelError, match=r"split\.head-blocks = 3.*none of the 4 blocks"):
        partition_of(directory, SplitSettings(head_blocks=3, tail_blocks=1))


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_one_owner_but_tied_embeddings(random_checkpoint, tied):
    directory = random_checkpoint(tie_word_embeddings=tied)
    partition = Partition(4, 1, 1)
    owned = {party: tensors_of(directory, partition, [party]) for party in PARTIES}
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        assert set.union(*owned.values()) == set(tensors.keys())
    counts = Counter(name for names in owned.values() for name in names)
    twice = [name for name, count in counts.items() if count > 1]
    assert twice == (["model.embed_tokens.weight"] if tied else [])
    assert all(".1." in name or ".2." in name for name in owned["body"])


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "OPT"])
def test_tied_embeddings_are_one_tensor_and_the_server_has_none(random_checkpoint, architecture):
    directory = random_checkpoint(architecture, tie_word_embeddings=True)
    parts = load_all(directory, 1, 1)
    embedding = parts["head"].model.get_input_embeddings().weight
    output = parts["tail"].model.get_output_embeddings().weight
    assert output.data_ptr() == embedding.data_ptr()
    assert not any(p.shape == embedding.shape for p in parts["body"].model.parameters())
    # A client's tail alone has its own.
    alone = load_parts(ModelSettings(name=str(directory)), directory, Partition(4, 1, 1), ["tail"])
    assert torch.equal(alone["tail"].model.get_output_embeddings().weight, embedding)


def test_tied_embeddings_stored_twice_are_still_one_tensor(random_checkpoint, tmp_path):
    directory = Path(shutil.copytree(random_checkpoint(tie_word_embeddings=True), tmp_path / "two"))
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for output, one in ((embedding.clone(), True), (embedding + 1, False)):
        tensors["lm_head.weight"] = output
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        parts = load_all(directory, 1, 1)
        held = parts["tail"].model.get_output_embeddings().weight
        ours = parts["head"].model.get_input_embeddings().weight
        assert (held.data_ptr() == ours.data_ptr()) == one
        tokens = draw_tokens()
        assert torch.equal(
            whole_logits(whole_model(directory), tokens), split_logits(parts, tokens)
        )


def test_names_without_the_prefix_of_the_backbone_are_understood(random_checkpoint, tmp_path):
    directory = Path(shutil.copytree(random_checkpoint("GPT2"), tmp_path / "bare"))
    tensors = load_file(directory / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    # Older versions saved the causal mask of every block, too.
    masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 64, 64) for block in range(4)}
    save_file(bare | masks, directory / "model.safetensors", metadata={"format": "pt"})
    parts, tokens = load_all(directory, 1, 1), draw_tokens()
    assert torch.equal(whole_logits(whole_model(directory), tokens), split_logits(parts, tokens))
    assert {"wte.weight", "wpe.weight"} < parts["head"].digests.keys()


def test_precision_is_the_settings(random_checkpoint, tmp_path):
    directory = tmp_path / "half"
    model = AutoModelForCausalLM.from_pretrained(random_checkpoint()).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokens = draw_tokens()
    for dtype in ("float32", "bfloat16"):
        whole = load_base_model_in_memory(directory, dtype)
        parts = load_all(directory, 1, 1, dtype=dtype)
        given = split_logits(parts, tokens)
        assert given.dtype == parts["body"].dtype == getattr(torch, dtype)
        assert torch.equal(whole_logits(whole, tokens), given)
    parts = load_all(random_checkpoint(), 1, 1, dtype="bfloat16")
    assert torch.equal(whole_logits(whole, tokens), split_logits(parts, tokens))


def load_base_model_in_memory(directory, dtype):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(
    "architecture", ["Llama", "GPT2", "Lfm2", nightly("FalconH1"), nightly("Qwen3Next")]
)
def test_quantised_parts_compute_what_the_quantised_whole_does(
    random_checkpoint, checkpoint, kind, architecture, tmp_path
):
    source = random_checkpoint(architecture, hidden_size=64, vocab_size=320)
    directory = Path(shutil.copytree(source, tmp_path / "q"))
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, directory)
    whole = load_base_model(ModelSettings(name=str(directory), quantization=kind)).model
    parts, tokens = load_all(directory, 1, 1, quantization=kind), draw_tokens()
    given = split_logits(parts, tokens)
    torch.testing.assert_close(given, whole_logits(whole, tokens), rtol=1e-4, atol=1e-4)
    footprints = sum(part.model.get_memory_footprint() for part in parts.values())
    assert footprints <= 1.01 * whole.get_memory_footprint() + 320 * 64 * 4
    hidden = torch.randn(3, 11, 64, requires_grad=True)
    parts["body"].train(False)
    parts["body"](hidden.detach(), Padding("right", LENGTHS))
    parts["body"](hidden, Padding("right", LENGTHS)).square().sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and hidden.grad.any()


def test_exactness_is_checked_once_at_the_real_depth(random_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path))
    directory = random_checkpoint("SmolLM3")
    settings = ModelSettings(name=str(directory))
    check_exactness(directory, settings, Partition(8, 1, 1))
    (mark,) = (tmp_path / "exactness").iterdir()
    mark.write_text("written by the test")
    check_exactness(directory, settings, Partition(8, 1, 1))
    assert mark.read_text() == "written by the test"  # a second check would replace it
    check_exactness(directory, settings, Partition(8, 2, 1))
    assert len(list(mark.parent.iterdir())) == 2


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma3nText", {"num_hidden_layers": 10}, "Gemma3nForCausalLM can't be split"),
        ("Mamba", {}, "MambaForCausalLM can't be split"),
        ("Bert", {}, "BertLMHeadModel can't be split .* not causal"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(
    architecture, changes, message, tmp_path, monkeypatch
):
    import transformers

    monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path / "cache"))
    config = getattr(transformers, f"{architecture}Config")(**changes)
    config.save_pretrained(tmp_path / "model")
    directory = tmp_path / "model"
    with pytest.raises(BaseModelError, match=message):
        check_exactness(
            directory, ModelSettings(name=str(directory)), Partition(config.num_hidden_layers, 1, 1)
        )
    assert not list((tmp_path / "cache").rglob("*"))
