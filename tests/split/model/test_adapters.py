"""Adapters of parts equal the whole model's when they are trained, joined and saved."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from finetuning.adapters.adapter import (
    attach_adapter,
    export_adapter,
    exported_names,
    initial_adapter,
    load_adapter,
    save_adapter,
    trainable_parameters,
)
from finetuning.errors import BaseModelError
from finetuning.settings import AdapterSettings
from split.model.adapters import join_adapters, take_apart
from split.model.partition import PARTIES, Partition
from split.protocol.frames import Padding
from tests.marks import nightly
from tests.split.conftest import (
    LENGTHS,
    draw_tokens,
    load_all,
    split_logits,
    whole_logits,
    whole_model,
)

PROJECTIONS = "q_proj,k_proj,v_proj"
TARGETS = {
    "Llama": PROJECTIONS,
    "Mixtral": PROJECTIONS,
    "Gemma2": PROJECTIONS,
    "OPT": "q_proj,fc1",
    "GPT2": "c_attn",
    "Bloom": "query_key_value",
    "GPTNeoX": "query_key_value,lm_head",
}


def settings_of(architecture: str, dropout: float = 0.0) -> AdapterSettings:
    return AdapterSettings(rank=2, alpha=4, dropout=dropout, targets=TARGETS[architecture])


def random_state(like, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(value.shape, generator=generator)
        for name, value in sorted(like.items())
    }


def adapted_whole(directory: Path, settings: AdapterSettings, seed: int = 0):
    model = attach_adapter(whole_model(directory), settings, str(directory))
    load_adapter(model, random_state(export_adapter(model), seed))
    return model


def fill(parts, state, name: str = "default") -> None:
    """Load each part's tensors of a whole model's adapter into it."""
    partition = parts["head"].partition
    for party, own in take_apart(state, partition).items():
        parameters = parts[party].trainable(name)
        assert parameters.keys() == own.keys()
        for key, parameter in parameters.items():
            parameter.data.copy_(own[key])


def adapted_parts(directory: Path, head: int, tail: int, settings, state, **model):
    parts = load_all(directory, head, tail, **model)
    for part in parts.values():
        part.attach(settings)
    fill(parts, state)
    return parts


def gradients_of(parts, name: str = "default") -> dict[str, torch.Tensor]:
    parameters = join_adapters(part.trainable(name) for part in parts.values())
    return {key: parameter.grad for key, parameter in parameters.items()}


@pytest.mark.parametrize(
    "architecture",
    # Whether these three cut rightly is tested by day without adapters.
    [nightly(name) if name in {"Mixtral", "Bloom", "GPT2"} else name for name in TARGETS],
)
def test_gradients_of_the_parts_equal_the_whole_model(architecture, random_checkpoint):
    directory, settings = random_checkpoint(architecture), settings_of(architecture)
    whole, tokens = adapted_whole(directory, settings), draw_tokens()
    expected_logits = whole_logits(whole, tokens)
    expected_logits.square().mean().backward()
    names = exported_names(whole)
    expected = {names[n]: p.grad for n, p in trainable_parameters(whole).items()}
    for head, tail in ((1, 1), (0, 0), (2, 1)):
        parts = adapted_parts(directory, head, tail, settings, export_adapter(whole))
        logits = split_logits(parts, tokens)
        assert torch.equal(logits, expected_logits)
        logits.square().mean().backward()
        found = gradients_of(parts)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6, msg=name)


def test_taking_apart_and_joining_are_inverse(random_checkpoint):
    directory = random_checkpoint()
    state, _ = initial_adapter(str(directory), AdapterSettings(targets=PROJECTIONS), seed=1)
    parts = take_apart(state, Partition(4, 1, 2))
    assert [len(parts[party]) for party in PARTIES] == [6, 6, 12]
    again = join_adapters(parts.values())
    assert list(again) == list(state) and all(again[n] is state[n] for n in state)
    with pytest.raises(ValueError, match="overlap"):
        join_adapters([parts["head"], state])
    with pytest.raises(ValueError, match="model's 3 blocks"):
        take_apart(state, Partition(3, 1, 1))


def test_a_joined_adapter_is_loaded_by_peft_and_gives_the_same(random_checkpoint, tmp_path):
    directory, settings = random_checkpoint(), settings_of("Llama")
    state, config = initial_adapter(str(directory), settings, seed=1)
    parts, tokens = adapted_parts(directory, 1, 1, settings, random_state(state)), draw_tokens()
    for part in parts.values():
        assert list(part.trainable()) == sorted(part.trainable())
        assert all(p.dtype == torch.float32 for p in part.trainable().values())
    joined = join_adapters(part.trainable() for part in parts.values())
    assert joined.keys() == state.keys()
    joined = {name: parameter.detach() for name, parameter in joined.items()}
    save_adapter(tmp_path / "adapter", joined, config, "# A card\n")
    theirs = PeftModel.from_pretrained(whole_model(directory), tmp_path / "adapter")
    ours = split_logits(parts, tokens)
    assert torch.equal(whole_logits(theirs, tokens), ours)
    for part in parts.values():
        part.use(None)
    bare = split_logits(parts, tokens)
    assert torch.equal(whole_logits(whole_model(directory), tokens), bare)
    assert not torch.allclose(bare, ours, atol=1e-2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_interleaved_adapters_train_as_in_separate_bodies(random_checkpoint, checkpointing):
    directory, settings = random_checkpoint(), settings_of("Llama", dropout=0.3)
    state, _ = initial_adapter(str(directory), settings, seed=1)
    names = ["Dr. A", "Dr. B"]
    given = [torch.randn(3, 11, 32, requires_grad=True) for _ in names]
    padding = Padding("right", LENGTHS)
    frozen = load_all(directory, 1, 1)["body"]
    expected = {}
    for index, name in enumerate(names):
        alone = adapted_parts(directory, 1, 1, settings, random_state(state, index))["body"]
        alone.train(True)
        torch.manual_seed(index)
        alone(given[index], padding).square().sum().backward()
        expected[name] = {n: p.grad for n, p in alone.trainable().items()}
        expected[name][""], given[index].grad = given[index].grad, None

    body = load_all(directory, 1, 1, gradient_checkpointing=checkpointing)["body"]
    for index, name in enumerate(names):
        body.attach(settings, name)
        for key, parameter in body.trainable(name).items():
            parameter.data.copy_(
                take_apart(random_state(state, index), body.partition)["body"][key]
            )
    body.train(True)
    outputs = []
    for index, name in enumerate(names):
        body.use(name)
        torch.manual_seed(index)
        outputs.append(body(given[index], padding))
    for name, output in zip(names, outputs, strict=True):
        body.use(name)
        output.square().sum().backward()
    for index, name in enumerate(names):
        found = {n: p.grad for n, p in body.trainable(name).items()} | {"": given[index].grad}
        assert found.keys() == expected[name].keys()
        for key, gradient in expected[name].items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-6, atol=1e-6)
    # However many adapters: the frozen weights are there once, and in all they are no more.
    adapters = {id(p) for name in names for p in body.trainable(name).values()}
    others = [p for p in body.model.parameters() if id(p) not in adapters]
    assert sum(p.numel() for p in others) == sum(p.numel() for p in frozen.model.parameters())
    assert not any(p.requires_grad for p in others)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_gradients_pass_through_quantised_parts(random_checkpoint, quantization):
    directory, settings = random_checkpoint(hidden_size=64), settings_of("Llama")
    state, _ = initial_adapter(str(directory), settings, seed=1)
    whole = adapted_whole(directory, settings)
    whole_logits(whole, draw_tokens()).square().mean().backward()
    parts = adapted_parts(
        directory, 1, 1, settings, export_adapter(whole), quantization=quantization
    )
    # Measuring first must not cost the gradients that follow.
    with torch.no_grad():
        split_logits(parts, draw_tokens())
    split_logits(parts, draw_tokens()).square().mean().backward()
    ours = gradients_of(parts)
    assert ours.keys() == state.keys()
    names = exported_names(whole)
    theirs = {names[n]: p for n, p in trainable_parameters(whole).items()}
    flat, expected = (
        torch.cat([g.flatten() for g in grads])
        for grads in ([ours[n] for n in sorted(ours)], [theirs[n].grad for n in sorted(ours)])
    )
    assert flat.isfinite().all()
    likeness = torch.nn.functional.cosine_similarity(flat, expected, dim=0)
    assert likeness > {"nf4": 0.8, "int8": 0.95}[quantization]


def test_a_party_without_adapted_modules_has_nothing_to_train(random_checkpoint):
    directory, tokens = random_checkpoint(), draw_tokens()
    parts = load_all(directory, 0, 0)
    before = split_logits(parts, tokens)
    for part in parts.values():
        part.attach(settings_of("Llama"), "one")
        part.use("one")
        part.use(None)
        part.use("one")
    assert parts["head"].trainable("one") == parts["tail"].trainable("one") == {}
    assert len(parts["body"].trainable("one")) == 24
    assert torch.equal(split_logits(parts, tokens), before), "it starts as no change"
    parts["head"].remove("one")
    with pytest.raises(KeyError):
        parts["head"].trainable("one")


def test_adapters_come_and_go(random_checkpoint):
    directory, settings, tokens = random_checkpoint(), settings_of("Llama"), draw_tokens()
    state, _ = initial_adapter(str(directory), settings, seed=1)
    parts = adapted_parts(directory, 1, 1, settings, random_state(state))
    one = split_logits(parts, tokens)
    for part in parts.values():
        part.attach(settings, "two")
        with pytest.raises(ValueError, match="already"):
            part.attach(settings, "two")
    fill(parts, random_state(state, 1), "two")
    two = split_logits(parts, tokens)
    assert not torch.allclose(one, two, atol=1e-2)
    for part in parts.values():
        part.use("default")
    assert torch.equal(split_logits(parts, tokens), one)
    for part in parts.values():
        part.remove("two")
    assert torch.equal(split_logits(parts, tokens), one), "another's removal changes nothing"
    for part in parts.values():
        part.remove("default")
        assert not any("lora_" in name for name, _ in part.model.named_parameters())
    bare = split_logits(parts, tokens)
    assert torch.equal(bare, split_logits(load_all(directory, 1, 1), tokens))
    for part in parts.values():
        part.attach(settings, "unused")
        part.use(None)  # as for another client, of whom the bare model is evaluated
        part.remove("unused")
        part.attach(settings, "three")
    fill(parts, random_state(state, 1), "three")
    assert torch.equal(split_logits(parts, tokens), two)


def test_the_default_targets_of_peft_equal_the_whole_model(random_checkpoint):
    directory = random_checkpoint()
    state, _ = initial_adapter(str(directory), AdapterSettings(), seed=0)
    parts = load_all(directory, 1, 1)
    for part in parts.values():
        part.attach(AdapterSettings())
    joined = join_adapters(part.trainable() for part in parts.values())
    assert {n: p.shape for n, p in joined.items()} == {n: p.shape for n, p in state.items()}


def test_a_target_that_cannot_be_adapted_is_refused(random_checkpoint):
    parts = load_all(random_checkpoint(), 1, 1)
    with pytest.raises(BaseModelError, match=r"adapter\.targets"):
        parts["body"].attach(AdapterSettings(targets="mlp"))


def test_dropout_is_for_training_only(random_checkpoint, tmp_path):
    directory = Path(shutil.copytree(random_checkpoint("GPT2"), tmp_path / "dropout"))
    settings = AdapterSettings(rank=2, dropout=0.5, targets="c_attn")
    state, _ = initial_adapter(str(directory), settings, seed=1)
    parts, tokens = adapted_parts(directory, 1, 1, settings, random_state(state)), draw_tokens()
    still = split_logits(parts, tokens)
    assert torch.equal(split_logits(parts, tokens), still)
    for part in parts.values():
        part.train(True)
    assert not torch.equal(split_logits(parts, tokens), still)
    for part in parts.values():
        part.train(False)
    assert torch.equal(split_logits(parts, tokens), still)
