"""Prefixes of parts: each party has its own blocks' prefixes, which join to the whole model's."""

import pytest
import torch

from finetuning.adapters.adapter import (
    attach_adapter,
    initial_adapter,
    load_adapter,
    load_state,
    trainable_parameters,
)
from finetuning.adapters.prefixes import SAVED, BlockPrefixes
from finetuning.errors import BaseModelError
from finetuning.model.backbone_inputs import left_padding
from finetuning.settings import AdapterSettings, ModelSettings
from split.model.adapters import join_adapters, take_apart
from split.model.exactness import check_exactness
from split.model.key_values import KeyValues
from split.model.partition import PARTIES, Partition
from split.protocol.frames import Padding
from tests.marks import nightly
from tests.split.conftest import (
    LENGTHS,
    draw_tokens,
    load_all,
    real_tokens,
    split_logits,
    whole_model,
)

PREFIX = AdapterSettings(kind="prefix", prefix_length=5)
LORA = AdapterSettings(rank=2, dropout=0.0, targets="q_proj,v_proj")
# What has as many heads of keys as of queries can't be told otherwise by the common sizes.
SAME_HEADS = {"num_key_value_heads": 4}
ARCHITECTURES = {
    "Llama": {},
    "Mistral": {},  # a window shorter than the prefix
    "Mixtral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Glm": {},
    "Gemma2": {},
    "Gemma3Text": {},
    "Phi3": {},
    "SmolLM3": {},
    "GptOss": {},
    "GPTNeoX": SAME_HEADS,
    "GPT2": SAME_HEADS,
    "OPT": SAME_HEADS,
    "Bloom": SAME_HEADS,
}

# Others place keys and values as one of these does; all are tested without prefixes by day.
BY_DAY = {"Llama", "Mistral", "Mixtral", "Gemma2", "GPT2", "OPT", "Bloom", "GptOss"}


def random_prefix(directory, seed: int = 1):
    return initial_adapter(str(directory), PREFIX, seed, directory)[0]


def prefixed_parts(directory, head: int, tail: int, state, names=("default",)):
    parts = load_all(directory, head, tail)
    for name in names:
        fill(parts, state, name)
    return parts


def fill(parts, state, name: str = "default") -> None:
    for party, own in take_apart(state, parts["head"].partition).items():
        parts[party].attach(PREFIX, name)
        load_state(parts[party].trainable(name), own)


def gradients_of(parts, name: str = "default"):
    """Return the parts' gradients, joined to the gradient of the whole model's prefix."""
    grads = [{n: p.grad for n, p in part.trainable(name).items()} for part in parts.values()]
    return join_adapters(grads)[SAVED]


def whole_logits(model, tokens: torch.Tensor, side: str) -> torch.Tensor:
    """Return the logits of PEFT's own forward for the tokens that aren't padding."""
    inputs = {"attention_mask": real_tokens(side).long()}
    if side == "left":
        inputs = left_padding(model.get_base_model().base_model, LENGTHS, tokens.shape[1])
    return model(input_ids=tokens, **inputs).logits[real_tokens(side)]


@pytest.mark.parametrize(
    "architecture", [name if name in BY_DAY else nightly(name) for name in ARCHITECTURES]
)
def test_logits_and_gradients_of_the_parts_equal_peft(architecture, random_checkpoint):
    directory = random_checkpoint(architecture, **ARCHITECTURES[architecture])
    state, tokens = random_prefix(directory), draw_tokens()
    whole = attach_adapter(whole_model(directory), PREFIX, str(directory)).eval()
    load_adapter(whole, state)
    (parameter,) = trainable_parameters(whole).values()
    expected, gradient = {}, {}
    for side in ("right", "left"):
        parameter.grad = None
        expected[side] = whole_logits(whole, tokens, side)
        expected[side].square().mean().backward()
        gradient[side] = parameter.grad
    for head, tail in ((1, 1), (0, 0), (2, 1)):
        parts = prefixed_parts(directory, head, tail, state)
        for side in ("right", "left"):
            for part in parts.values():
                for own in part.trainable().values():
                    own.grad = None
            logits = split_logits(parts, tokens, side)
            torch.testing.assert_close(logits, expected[side], rtol=1e-5, atol=1e-5)
            logits.square().mean().backward()
            torch.testing.assert_close(
                gradients_of(parts), gradient[side], rtol=1e-5, atol=1e-6, msg=f"{side} {head}"
            )
    for part in parts.values():
        part.use(None)
    bare = split_logits(parts, tokens, "left")
    assert torch.equal(bare, split_logits(load_all(directory, 2, 1), tokens, "left"))
    assert not torch.allclose(bare, expected["left"], atol=1e-3)


def lose_prefixes_of_the_tail(patch):
    before = BlockPrefixes.before

    def lost_at_the_tail(self, inputs, *rest):
        own = "input_ids" in inputs or len(self.parameters) != 1
        return before(self, inputs, *rest) if own else dict(inputs)

    patch.setattr(BlockPrefixes, "before", lost_at_the_tail)


def lose_cached_prefixes_of_the_tail(patch):
    fill = BlockPrefixes.fill

    def not_at_the_tail(self, cache, *rest):
        if 3 not in self._blocks:
            fill(self, cache, *rest)

    patch.setattr(BlockPrefixes, "fill", not_at_the_tail)


def change_positions_of_the_next_tokens(patch):
    positions = KeyValues.mask_and_positions

    def wrong_positions(self, columns):
        result = positions(self, columns)
        if self.columns:
            result["position_ids"] = result["position_ids"] - 2
        return result

    patch.setattr(KeyValues, "mask_and_positions", wrong_positions)


@pytest.mark.parametrize(
    ("architecture", "fault", "generation"),
    [
        *((name, lose_prefixes_of_the_tail, False) for name in ("Gemma2", "OPT")),
        *(nightly(name, lose_prefixes_of_the_tail, False) for name in ("GPT2", "Mixtral")),
        *(
            case
            for fault in (lose_cached_prefixes_of_the_tail, change_positions_of_the_next_tokens)
            for case in (
                ("Llama", fault, True),
                ("GPT2", fault, True),
                nightly("Gemma2", fault, True),
                nightly("OPT", fault, True),
            )
        ),
    ],
)
def test_the_check_before_a_run_notices(
    random_checkpoint, architecture, fault, generation, monkeypatch, tmp_path
):
    """A fault of generation has no effect on forward passes without caches."""
    monkeypatch.setenv("CHAMBERS_CACHE", str(tmp_path))
    directory = random_checkpoint(architecture, **ARCHITECTURES[architecture])
    prefixes = fault is not change_positions_of_the_next_tokens
    checked = ModelSettings(name=str(directory)), Partition(4, 1, 1), prefixes
    reason = r"generates.*evaluate\.generate = false" if generation else r"with prefixes differ"
    with monkeypatch.context() as patch:
        fault(patch)
        if generation:
            check_exactness(directory, *checked)
        with pytest.raises(BaseModelError, match=reason):
            check_exactness(directory, *checked, generation=generation)
    check_exactness(directory, *checked, generation=generation)


def test_a_prefix_is_taken_apart_by_blocks_and_joined_again(base):
    state = random_prefix(base)
    parts = take_apart(state, Partition(6, 2, 1))
    assert [sorted(parts[party]) for party in PARTIES] == [
        [f"{SAVED}.0", f"{SAVED}.1"],
        [f"{SAVED}.2", f"{SAVED}.3", f"{SAVED}.4"],
        [f"{SAVED}.5"],
    ]
    assert all(value.is_contiguous() for part in parts.values() for value in part.values())
    joined = join_adapters(parts.values())
    assert joined.keys() == {SAVED} and torch.equal(joined[SAVED], state[SAVED])
    with pytest.raises(ValueError, match="no part has the prefix of block 2"):
        join_adapters([parts["head"], parts["tail"]])
    with pytest.raises(ValueError, match="overlap"):
        join_adapters([parts["head"], parts["head"]])
    with pytest.raises(ValueError, match="model's 7 blocks"):
        take_apart(state, Partition(7, 1, 1))


def test_interleaved_prefixes_train_as_in_separate_bodies(base):
    names, padding = ["Dr. A", "Dr. B"], Padding("right", LENGTHS)
    states = {name: random_prefix(base, seed) for seed, name in enumerate(names)}
    given = {name: torch.randn(3, 11, 32) for name in names}
    expected = {}
    for name in names:
        alone = prefixed_parts(base, 1, 1, states[name])["body"]
        alone(given[name], padding).square().sum().backward()
        expected[name] = {n: p.grad for n, p in alone.trainable().items()}
    parts = load_all(base, 1, 1)
    for name in names:
        fill(parts, states[name], name)
    body = parts["body"]
    # LoRA on the same blocks has no effect on them.
    body.attach(LORA, "lora")
    body.train(True)
    outputs = {}
    for name in names:
        body.use(name)
        outputs[name] = body(given[name], padding)
    for name in names:
        body.use(name)
        outputs[name].square().sum().backward()
    for name in names:
        found = {n: p.grad for n, p in body.trainable(name).items()}
        assert found.keys() == expected[name].keys()
        for key, value in expected[name].items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)


def test_prefixes_come_and_go(base):
    state, other = random_prefix(base, 1), random_prefix(base, 2)
    tokens, bare = draw_tokens(), split_logits(load_all(base, 1, 1), draw_tokens())
    parts = prefixed_parts(base, 1, 1, state)
    one = split_logits(parts, tokens)
    fill(parts, other, "two")
    with pytest.raises(ValueError, match="already"):
        parts["body"].attach(PREFIX, "two")
    assert not torch.allclose(split_logits(parts, tokens), one, atol=1e-2)
    for part in parts.values():
        part.use("default")
    assert torch.equal(split_logits(parts, tokens), one)
    for part in parts.values():
        part.remove("two")
    assert torch.equal(split_logits(parts, tokens), one), "another's removal changes nothing"
    for part in parts.values():
        part.remove("default")
        with pytest.raises(KeyError):
            part.trainable("default")
    assert torch.equal(split_logits(parts, tokens), bare)


def test_a_party_without_blocks_has_no_prefix(base):
    parts = prefixed_parts(base, 0, 0, random_prefix(base))
    assert parts["head"].trainable() == parts["tail"].trainable() == {}
    assert len(parts["body"].trainable()) == 6


def test_prefixes_and_gradient_checkpointing_are_refused(base):
    parts = load_all(base, 1, 1, gradient_checkpointing=True)
    with pytest.raises(BaseModelError, match="gradient-checkpointing"):
        parts["body"].attach(PREFIX)
    assert list(parts["body"].model.parameters())
    parts["body"].attach(LORA)
