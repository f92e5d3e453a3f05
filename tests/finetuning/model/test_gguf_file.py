"""A GGUF file as base model is read exactly and only once, or refused with a reason."""

from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetuning.adapters.model_card import model_card
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model
from finetuning.model.checkpoint import client_parameters
from finetuning.model.fingerprint import fingerprint
from finetuning.model.gguf_file import origin_of
from finetuning.model.locating import locate
from finetuning.settings import ModelSettings
from tests.gguf_files import write_gguf

TOKENS = torch.arange(2, 40)[None]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path / "cache"))


def logits(directory: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(directory)(TOKENS).logits.detach()


def test_it_computes_what_the_checkpoint_does(checkpoint, tmp_path):
    template = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    file = write_gguf(checkpoint, tmp_path / "model.gguf", chat_template=template)
    base = load_base_model(ModelSettings(name=str(file), dtype="float32"))
    assert torch.equal(base.model.cpu()(TOKENS).logits, logits(checkpoint))
    tensors = {name for name in fingerprint(checkpoint) if name.startswith(("model.", "lm_head"))}
    theirs, ours = fingerprint(checkpoint), fingerprint(base.directory)
    assert tensors and {n: ours[n] for n in tensors} == {n: theirs[n] for n in tensors}
    text = "the court holds: naïve § 12"
    original = AutoTokenizer.from_pretrained(checkpoint)
    assert base.tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert base.tokenizer.eos_token == "<end>"
    assert base.tokenizer.chat_template == template
    assert client_parameters(file) == client_parameters(checkpoint)
    assert client_parameters(file, 1) == client_parameters(checkpoint, 1)


def test_a_sentencepiece_tokenizer_is_read(checkpoint, sentencepiece_file, tmp_path):
    """Llama 2 and Gemma have such tokenizers."""
    file = write_gguf(checkpoint, tmp_path / "model.gguf", sentencepiece=sentencepiece_file)
    tokenizer = load_base_model(ModelSettings(name=str(file))).tokenizer
    original = SentencePieceProcessor(model_file=str(sentencepiece_file))
    for text in ("the court holds", "naïve § 12", "two\nlines", "法院"):
        assert tokenizer(text)["input_ids"] == [original.bos_id(), *original.encode(text)]
    assert tokenizer.eos_token == "</s>"


def test_its_quantisation_is_named(checkpoint, tmp_path):
    file = write_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0")
    directory = locate(str(file))
    exact = logits(checkpoint)
    assert 0 < (logits(directory) - exact).norm() / exact.norm() < 0.05
    origin = origin_of(directory)
    assert (origin["file"], origin["quantization"]) == ("model.gguf", "Q8_0")
    card = model_card("", str(file), directory, clients=3, rounds=1, kind="lora", config={})
    assert f"- Base model: `{file.name}` (GGUF, Q8_0; SHA-256 {origin['sha256']})" in card
    card = model_card("", str(checkpoint), checkpoint, clients=3, rounds=1, kind="lora", config={})
    assert "GGUF" not in card


def test_it_is_kept_by_its_content(checkpoint, tmp_path):
    file = write_gguf(checkpoint, tmp_path / "one.gguf")
    first = locate(str(file))
    assert locate(str(file.rename(tmp_path / "two.gguf"))) == first
    write_gguf(checkpoint, file, "Q8_0")
    assert locate(str(file)) != first


def refusal(file: Path) -> str:
    with pytest.raises(BaseModelError) as caught:
        locate(str(file))
    message = str(caught.value)
    assert f'model.name = "{file}": {file} ' in message
    cache = file.parent / "cache"
    assert not [path for path in cache.rglob("*") if path.name.endswith((".new", ".safetensors"))]
    return message


def test_other_files_are_refused(checkpoint, tmp_path):
    file = tmp_path / "model.gguf"
    for content in (b"", b"a pickle"):
        file.write_bytes(content)
        assert "is not a GGUF file; a base model is a GGUF file, a checkpoint" in refusal(file)
    message = refusal(write_gguf(checkpoint, file, architecture="clip"))
    assert "has the architecture clip, which transformers can't read from GGUF" in message
    assert "use the checkpoint in safetensors format" in message
    message = refusal(write_gguf(checkpoint, file, left_out="blk.1.ffn_up.weight"))
    assert (
        "tensors, including model.layers.1.mlp.up_proj.weight; if it is one of several" in message
    )
    message = refusal(write_gguf(checkpoint, file, scales_positions=True))
    assert "scales positions (RoPE) in a way that transformers doesn't read from GGUF" in message


@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 0.5, 0.99])
def test_a_file_that_ends_early_is_refused(checkpoint, tmp_path, share):
    whole = write_gguf(checkpoint, tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[: max(5, int(share * len(whole)))])
    message = refusal(file)
    assert "is damaged or incomplete" in message and "download it again" in message
