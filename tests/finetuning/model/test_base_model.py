"""The base model is found, refused, loaded, quantised, and identified by its fingerprint."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2AudioConfig,
    Qwen3_5Config,
)

from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model, text_config
from finetuning.model.fingerprint import combine_digests, differences, fingerprint
from finetuning.model.locating import locate
from finetuning.model.tiny import TinyRecipe, build_tiny
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import draw_weights


@pytest.fixture
def copied(checkpoint, tmp_path) -> Path:
    """A copy of the small checkpoint that may be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copied"))


@pytest.fixture
def sharded(checkpoint, tmp_path) -> Path:
    """The small checkpoint, saved again in several files."""
    directory = tmp_path / "sharded"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(directory, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def refusal(name: str) -> str:
    with pytest.raises(BaseModelError) as caught:
        locate(name)
    message = str(caught.value)
    assert f'model.name = "{name}"' in message
    return message


def test_a_directory_loads_sharded_or_not(checkpoint, sharded):
    tokens = torch.arange(2, 30)[None]
    base = load_base_model(ModelSettings(name=str(checkpoint)))
    assert base.directory == checkpoint
    assert base.model.dtype == torch.float32
    assert not any(p.requires_grad for p in base.model.parameters())
    in_shards = load_base_model(ModelSettings(name=str(sharded)))
    assert torch.equal(base.model(tokens).logits, in_shards.model(tokens).logits)
    half = load_base_model(ModelSettings(name=str(checkpoint), dtype="bfloat16"))
    assert half.model.dtype == torch.bfloat16


def test_refusals_name_the_setting_and_what_to_do(copied, tmp_path):
    assert "no config.json" in refusal(str(tmp_path / "missing"))
    assert "Hugging Face format" in refusal(str(tmp_path))
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(b"a pickle")
    assert "convert" in refusal(str(copied))
    message = refusal("nobody/has-this-model")
    assert "absolute path" in message and "cache" in message
    refusal("../not an id")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "nothing"}, r'no class .* \(model_type "nothing"\); use a different'),
        ({"model_type": "clip"}, r'no class .* \(model_type "clip"\); use a different'),
        ({"dtype": "bfloat61"}, "no attribute 'bfloat61'; compare it with"),
        ({"num_attention_heads": 5}, r"not a multiple of .* heads \(5\); compare it with"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json can't be .*; compare it with"),
        ({"hidden_act": "swoosh"}, "KeyError: 'swoosh'; compare it with"),
        ({"vocab_size": 100}, r"weight of shape \[320, 32\] instead of \[100, 32\]; compare it"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_refused(copied, change, reason):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BaseModelError, match=reason):
        load_base_model(ModelSettings(name=str(copied)))


def test_a_wrapper_need_not_say_whether_embeddings_are_tied(tmp_path):
    Qwen2AudioConfig().save_pretrained(tmp_path)
    assert text_config(tmp_path).model_type == "qwen2"


def test_a_wrapper_may_give_the_end_and_the_tied_embeddings(tmp_path):
    Qwen3_5Config(eos_token_id=[5, 7], tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("eos_token_id", "tie_word_embeddings"):
        config["text_config"].pop(key, None)
    file.write_text(json.dumps(config))
    text = text_config(tmp_path)
    assert (text.eos_token_id, text.tie_word_embeddings) == ([5, 7], True)


def test_incomplete_and_adapted_checkpoints_are_refused(sharded):
    (sharded / "model-00002-of-00007.safetensors").unlink()
    with pytest.raises(BaseModelError, match=r"lacks model-00002-of-00007\.safetensors; copy"):
        load_base_model(ModelSettings(name=str(sharded)))
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "is no index of tensors; copy" in refusal(str(sharded))
    (sharded / "adapter_config.json").write_text("{}")
    assert "move its adapter_config.json" in refusal(str(sharded))


def test_a_checkpoint_that_lacks_tensors_is_refused(copied):
    """They would be random, and differ between processes."""
    file = copied / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match=r"lacks 1 tensors, .*1\.mlp\.up_proj"):
        load_base_model(ModelSettings(name=str(copied)))


def test_a_tokenizer_without_padding_pads_with_its_end(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(copied).pad_token_id is None
    tokenizer = load_tokenizer(copied)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_unusable_tokenizers_are_refused(copied):
    config = json.loads((copied / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (copied / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelError, match="end-of-text"):
        load_tokenizer(copied)
    for file in copied.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BaseModelError, match="tokenizer"):
        load_tokenizer(copied)


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copied, special):
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.add_tokens(["<image>"], special_tokens=special)
    tokenizer.save_pretrained(copied)
    if special:  # only a model that also accepts images has an embedding for it
        assert load_tokenizer(copied).get_vocab()["<image>"] == 320
        tokenizer.eos_token = "<image>"
        tokenizer.save_pretrained(copied)
    with pytest.raises(BaseModelError, match=r"320 embeddings are too few, such as <image>; use"):
        load_tokenizer(copied)


def test_mistrals_tokenizers_split_words_as_in_its_own_format(copied):
    """Some have a wrong pattern, which transformers replaces on request."""
    file, config = copied / "tokenizer.json", copied / "config.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"unused {number}": number for number in range(1_000, 101_000)}
    split = {"type": "Split", "pattern": {"Regex": r"\d{1,3}|\D+"}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, {"type": "ByteLevel", "use_regex": False}]
    steps[1] |= {"add_prefix_space": False, "trim_offsets": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    file.write_text(json.dumps(content))
    changes = {"model_type": "mistral", "transformers_version": "4.50.0", "vocab_size": 101_000}
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    (copied / "tekken.json").write_text("{}")
    split_words = load_tokenizer(copied).backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [word for word, _ in split_words("2023")] == ["2", "0", "2", "3"]


@pytest.fixture
def quantizable(checkpoint, tmp_path) -> Path:
    """A random model whose rows are as long as a quantisation block."""
    directory = tmp_path / "quantizable"
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
        )
    ).save_pretrained(directory)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_model_is_small_close_and_trainable(
    quantizable, draw_examples, batches_of, kind
):
    plain = load_base_model(ModelSettings(name=str(quantizable))).model
    tokens = torch.arange(2, 40, device=plain.device)[None]
    exact = plain(tokens).logits
    quantized = load_base_model(ModelSettings(name=str(quantizable), quantization=kind)).model
    assert quantized.get_memory_footprint() < plain.get_memory_footprint() / 2
    error = (quantized(tokens).logits - exact).norm() / exact.norm()
    assert 0 < error < {"nf4": 0.3, "int8": 0.05}[kind]

    settings = AdapterSettings(dropout=0.0, targets="q_proj,v_proj")
    model = draw_weights(attach_adapter(quantized, settings, str(quantizable)), 0.1)
    stages, parameters = WholeModel(model), trainable_parameters(model)
    # A round first evaluates, which must not disable the gradients that follow.
    batches = batches_of(draw_examples(6), 10**6)
    before = stages.summed_losses(batches[:1])[0]
    assert all(gradient.any() for gradient in stages.gradients_of(batches[0]).values())
    stages.accumulate(batches, seed=0)
    slope = sum(float(p.grad.square().sum()) for p in parameters.values())
    # A small step along the gradient changes the loss as predicted.
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.sub_(0.02 / slope * parameter.grad)
    targets = len(batches[0].labels)
    change = (before - stages.summed_losses(batches[:1])[0]) / targets
    assert change == pytest.approx(0.02, rel=0.3)


def test_fingerprints_are_equal_however_the_checkpoint_is_saved(checkpoint, sharded, tmp_path):
    ours = fingerprint(checkpoint)
    with safe_open(checkpoint / "model.safetensors", framework="pt") as tensors:
        assert set(ours) == {*tensors.keys(), "config.json", "tokenizer.json", "chat template"}
    assert fingerprint(sharded) == ours
    again = tmp_path / "again"
    AutoModelForCausalLM.from_pretrained(sharded).save_pretrained(again)
    AutoTokenizer.from_pretrained(sharded).save_pretrained(again)
    assert fingerprint(again) == ours
    assert combine_digests(fingerprint(again)) == combine_digests(ours)


def test_a_different_value_configuration_or_tokenizer_is_named(checkpoint, copied):
    ours = fingerprint(checkpoint)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(copied / "model.safetensors")
    tensors[name][3, 4] += 1e-6
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    theirs = fingerprint(copied)
    assert differences(ours, theirs) == differences(theirs, ours) == [name]
    assert combine_digests(ours) != combine_digests(theirs)

    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert differences(ours, fingerprint(copied)) == ["config.json", name, "tokenizer.json"]

    del tensors[name]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert name in differences(ours, fingerprint(copied))


def test_tensors_are_read_again_only_when_the_file_has_changed(copied):
    ours = fingerprint(copied)
    file = copied / "model.safetensors"
    stamp = file.stat()
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * stamp.st_size)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert fingerprint(copied) == ours, "the cached digests were not used"
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 10**9))
    with pytest.raises(Exception, match=r"(?i)header"):
        fingerprint(copied)
    file.write_bytes(whole)
    assert fingerprint(copied) == ours


RECIPE = TinyRecipe(
    vocabulary=300,
    hidden=16,
    blocks=1,
    heads=2,
    passages=6,
    inputs=3,
    sequence_length=16,
    batch_size=2,
    steps=3,
)


def test_tiny_is_the_same_wherever_it_is_built(tmp_path, monkeypatch):
    built = []
    for cache, threads in (("one", 1), ("two", 2)):
        monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path / cache))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(threads)
        built.append(build_tiny(RECIPE))
        assert torch.get_num_threads() == threads
        torch.set_num_threads(before)
        assert built[-1].parent == tmp_path / cache
    assert fingerprint(built[0]) == fingerprint(built[1])
    base = load_base_model(ModelSettings(name=str(built[0])))
    text = "Naïve § 12: 合同法"
    assert base.tokenizer.decode(base.tokenizer(text)["input_ids"]) == text
    tokens = torch.tensor([base.tokenizer(text)["input_ids"]], device=base.model.device)
    assert base.model(tokens).logits.isfinite().all()


def test_a_chat_template_is_part_of_the_fingerprint(copied):
    before = fingerprint(copied)
    (copied / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert differences(before, fingerprint(copied)) == ["chat template"]


def test_a_model_whose_tokens_see_later_ones_is_refused(copied, monkeypatch):
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def sees_everything(self, input_ids, **options):
        size = input_ids.shape[1]
        mask = torch.ones(1, 1, size, size, dtype=torch.bool, device=input_ids.device)
        return forward(self, input_ids=input_ids, attention_mask=mask, **options)

    with torch.no_grad():  # larger weights, so that differences are noticed
        model = load_base_model(ModelSettings(name=str(copied))).model
        for parameter in model.parameters():
            parameter.mul_(10)
        model.save_pretrained(copied)
    monkeypatch.setattr(LlamaForCausalLM, "forward", sees_everything)
    with pytest.raises(BaseModelError, match="not causal"):
        load_base_model(ModelSettings(name=str(copied)))


@pytest.mark.slow
def test_code_in_a_checkpoint_is_not_run(checkpoint, tmp_path):
    """Not even if transformers' question is answered with yes on standard input."""
    shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Own"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    (tmp_path / "model" / "code.py").write_text(f"{code}\nclass Own: pass\n")
    load = (
        "import sys; from finetuning.model.base_model import load_base_model\n"
        "from finetuning.settings import ModelSettings\n"
        "load_base_model(ModelSettings(name=sys.argv[1]))"
    )
    command = [sys.executable, "-c", load, str(tmp_path / "model")]
    done = subprocess.run(command, input="y\ny\n", capture_output=True, text=True, check=False)
    assert "BaseModelError" in done.stderr
    assert not (tmp_path / "ran").exists()
