"""Prefixes of a whole model, compared with PEFT's own forward, and saved in PEFT's format."""

import time
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetuning.adapters.adapter import (
    attach_adapter,
    export_adapter,
    exported_names,
    initial_adapter,
    load_adapter,
    trainable_parameters,
)
from finetuning.adapters.prefixes import SAVED
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.errors import BaseModelError
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import draw_weights

PREFIX = AdapterSettings(kind="prefix", prefix_length=5)
# These architectures have as many key heads as query heads, unlike the common sizes.
SAME_HEADS = {"num_key_value_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"head_dim": 16},  # together, its heads are wider than the model
    "qwen2": {},
    "gemma2": {},  # later tokens' windows of 8 no longer contain the prefix
    "granite": {},
    "gpt2": SAME_HEADS,
    "opt": SAME_HEADS,
    "bloom": SAME_HEADS,
}


@pytest.mark.parametrize("words", ["the court finds", "the court finds that the appeal is late"])
def test_prefixes_of_a_text_are_the_text_itself(base, checkpoint, words):
    """A text that is shorter than the prefix is repeated, and one that is longer is cut."""
    settings = PREFIX.model_copy(update={"initial_text": words})
    state, _ = initial_adapter(str(checkpoint), settings, seed=1)
    text = torch.tensor([(base.tokenizer(words)["input_ids"] * 5)[:5]])
    tokens = torch.tensor([[7, 11, 3, 5]])
    with torch.no_grad():
        expected = base.model(torch.cat([text, tokens], 1)).logits[:, 5:]
        model = attach_adapter(base.model, settings, "base")
        load_adapter(model, state)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def prefixed(model: Any) -> Any:
    """Attach random prefixes, which already have an effect, to a model."""
    return draw_weights(attach_adapter(model, PREFIX, "base"))


def test_dropout_drops_a_share_of_a_prefix_in_training_alone(base):
    model = prefixed(base.model)
    dropping, plain = WholeModel(model, 0.4), WholeModel(model)
    tokens = torch.tensor([7, 11, 3, 5, 9, 4])
    example = Example(tokens, torch.arange(6) > 2, 3, "", 0)
    batch = collate([example], 0)
    assert dropping.summed_losses([batch]) == plain.summed_losses([batch])
    dropping.accumulate([batch], seed=1)
    assert (gradient(model) == 0).float().mean() == pytest.approx(0.4, abs=0.06)


def gradient(peft_model: Any) -> torch.Tensor:
    (parameter,) = trainable_parameters(peft_model).values()
    taken, parameter.grad = parameter.grad, None
    return taken


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradient_equal_those_of_peft(
    random_model, draw_examples, reference_loss, batches_of, architecture
):
    bare = random_model(architecture, **ARCHITECTURES[architecture])
    examples = draw_examples(7)
    (padded,) = batches_of(examples, 10**6)
    assert padded.lengths.min() < padded.lengths.max()
    base_loss = reference_loss(bare, examples).item()
    model = prefixed(bare)
    loss = reference_loss(model.eval(), examples)
    loss.backward()
    expected = gradient(model)
    ours = WholeModel(model)
    for budget in (10**6, 40, 1):  # one micro-batch, several, one for each example
        batches = batches_of(examples, budget)
        targets = sum(len(batch.labels) for batch in batches)
        assert sum(ours.accumulate(batches, seed=0)) / targets == pytest.approx(
            loss.item(), rel=1e-6, abs=1e-6
        )
        found = gradient(model)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert sum(ours.summed_losses(batches)) / targets == pytest.approx(loss.item(), rel=1e-6)
    (only,) = ours.gradients_of(padded).values()
    torch.testing.assert_close(only, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().max() > 1e-4
    assert held_out_loss(ours, examples, 0, 4).loss == pytest.approx(loss.item(), rel=1e-6)
    with ours.without_adapter():
        without = held_out_loss(ours, examples, 0, 4).loss
    assert without == pytest.approx(base_loss, rel=1e-6)
    assert abs(without - loss.item()) > 1e-3
    assert held_out_loss(ours, examples, 0, 4).loss == pytest.approx(loss.item(), rel=1e-6)


def test_a_micro_batch_has_room_for_prefixes(random_model, draw_examples):
    """If prefixes weren't counted, micro-batches of short rows would be too large."""
    examples = draw_examples(40)
    longest = max(len(example.tokens) for example in examples)
    taken: list[int] = []

    class Watched(WholeModel):
        def accumulate(self, batches, seed):
            taken.extend(len(b.tokens) * (5 + b.tokens.shape[1]) for b in batches)
            return super().accumulate(batches, seed)

        def summed_losses(self, batches):
            taken.extend(len(b.tokens) * (self.columns_before + b.tokens.shape[1]) for b in batches)
            return super().summed_losses(batches)

    model = Watched(prefixed(random_model()))
    local_round = LocalRound([list(range(40))], 0, 1, 0, time.monotonic() + 60)
    parameters = trainable_parameters(model.peft_model)
    train_round(model, parameters, examples, 0, local_round, TrainSettings(batch_size=4))
    held_out_loss(model, examples, 0, 4)
    assert max(taken) <= 4 * (5 + longest)
    assert max(taken) > 4 * longest
    with model.without_adapter():
        taken.clear()
        held_out_loss(model, examples, 0, 4)
    assert max(taken) <= 4 * longest


def test_the_initial_prefix_depends_on_the_seed(base, checkpoint):
    state, config = initial_adapter(str(checkpoint), PREFIX, 3)
    again, _ = initial_adapter(str(checkpoint), PREFIX, 3)
    other, _ = initial_adapter(str(checkpoint), PREFIX, 4)
    model = attach_adapter(base.model, PREFIX, base.reference)
    assert state.keys() == {SAVED}
    assert {n: v.shape for n, v in state.items()} == {
        n: v.shape for n, v in export_adapter(model).items()
    }
    assert torch.equal(state[SAVED], again[SAVED])
    assert not torch.equal(state[SAVED], other[SAVED])
    assert state[SAVED].std() == pytest.approx(1, abs=0.1)
    assert (config.num_virtual_tokens, config.prefix_projection) == (5, False)
    assert set(exported_names(model).values()) == {SAVED}
    load_adapter(model, state)
    assert torch.equal(export_adapter(model)[SAVED], state[SAVED])
    with pytest.raises(ValueError, match="shape"):
        load_adapter(model, {SAVED: state[SAVED][:-1]})


def test_generated_answers_are_the_likeliest_tokens_one_by_one(base, draw_examples):
    model = prefixed(base.model)
    examples = draw_examples(4, longest=12)
    prompts = [example.tokens[: example.prompt_length] for example in examples]
    assert len({len(prompt) for prompt in prompts}) > 1
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = prompt.tolist()
            for _ in range(6):
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
                if tokens[-1] == base.tokenizer.eos_token_id:
                    break
            answer = tokens[len(prompt) :]
            expected.append(base.tokenizer.decode(answer, skip_special_tokens=True).strip())
    assert generate_texts(WholeModel(model), base.tokenizer, prompts, 3, 6) == expected


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MambaConfig", {}),
        ("FalconConfig", {}),  # its configuration doesn't say that queries share one head of keys
        ("DeepseekV3Config", {}),  # keys and values are not equally wide
        ("Qwen3NextConfig", {"layer_types": ["linear_attention", "full_attention"]}),
        ("Gemma4TextConfig", {}),  # blocks differ
    ],
)
def test_architectures_that_take_no_prefix_are_refused_by_name(tmp_path, architecture, changes):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config = getattr(transformers, architecture)(**(sizes | changes))
    config.save_pretrained(tmp_path)
    with pytest.raises(BaseModelError, match=f"{architecture[:5]}.*adapter.kind") as caught:
        initial_adapter("a model", PREFIX, 0, tmp_path)
    assert 'adapter.kind = "prefix" does not support' in str(caught.value)


def test_prefixes_and_gradient_checkpointing_are_refused(checkpoint):
    base = load_base_model(ModelSettings(name=str(checkpoint), gradient_checkpointing=True))
    with pytest.raises(BaseModelError, match=r"prefix.*checkpointing"):
        attach_adapter(base.model, PREFIX, base.reference)


def test_the_prefix_of_a_model_on_meta_needs_no_weights(checkpoint, tmp_path):
    AutoConfig.from_pretrained(checkpoint).save_pretrained(tmp_path)
    state, _ = initial_adapter(str(tmp_path), PREFIX, 3, tmp_path)
    expected, _ = initial_adapter(str(checkpoint), PREFIX, 3)
    assert torch.equal(state[SAVED], expected[SAVED])
