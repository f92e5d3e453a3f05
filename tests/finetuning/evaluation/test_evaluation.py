"""Held-out loss and generated answers: batches, compared with one example at a time."""

import math

import pytest
import torch

from finetuning.adapters.adapter import attach_adapter
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.held_out import held_out_loss
from finetuning.settings import AdapterSettings
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import draw_weights


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_held_out_loss_is_the_mean_over_all_targets(
    adapted, draw_examples, reference_loss, architecture, batch_size
):
    model = adapted(architecture, dropout=0.5)
    examples = draw_examples(11)
    result = held_out_loss(WholeModel(model), examples, 0, batch_size)
    assert model.training, "the mode was restored"
    with torch.no_grad():
        expected = reference_loss(model.eval(), examples).item()
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert result.target_tokens == sum(int(e.is_target[1:].sum()) for e in examples)


@pytest.fixture
def model_and_tokenizer(base):
    """The small checkpoint with an adapter that makes next-token predictions more certain."""
    model = attach_adapter(base.model, AdapterSettings(targets="q_proj,v_proj"), base.reference)
    draw_weights(model, seed=3)
    model.get_base_model().lm_head.weight.data *= 20
    return model, base.tokenizer


def drawn_prompts(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 280, (length,), generator=generator) for length in lengths]


def test_answers_end_at_the_end_mark_of_the_template(
    model_and_tokenizer,
):
    """This happens with base models whose template is ChatML; training teaches its mark."""
    model, tokenizer = model_and_tokenizer
    (prompt,) = drawn_prompts([7])
    model.eval()
    output = model.generate(input_ids=prompt[None], max_new_tokens=12, do_sample=False)
    new = output[0, 7:].tolist()
    stop = next(i for i in range(2, 12) if new[i] not in new[:i])
    mark = tokenizer.convert_ids_to_tokens(new[stop])
    tokenizer.add_special_tokens({"additional_special_tokens": [mark]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content + mark }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ).replace("mark", repr(mark))
    assert tokenizer.convert_tokens_to_ids(mark) == new[stop] != tokenizer.eos_token_id
    (answer,) = generate_texts(WholeModel(model), tokenizer, [prompt], 1, 12)
    assert answer == tokenizer.decode(new[:stop], skip_special_tokens=True).strip()
    (text,) = generate_texts(WholeModel(model), tokenizer, [prompt], 1, 12, exactly=True)
    assert text == tokenizer.decode(new, skip_special_tokens=True)


def test_batched_generation_equals_one_by_one(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    prompts = drawn_prompts([5, 19, 2, 11, 11, 1, 30])
    expected = []
    model.eval()
    for prompt in prompts:
        tokens = prompt.tolist()
        answer: list[int] = []
        while len(answer) < 12 and tokenizer.eos_token_id not in answer:
            with torch.no_grad():
                logits = model(torch.tensor([tokens + answer])).logits
            answer.append(int(logits[0, -1].argmax()))
        expected.append(tokenizer.decode(answer, skip_special_tokens=True).strip())
    assert len(set(expected)) > 3

    model.train()
    for batch_size in (1, 3, 7):
        answers = generate_texts(WholeModel(model), tokenizer, prompts, batch_size, 12)
        assert answers == expected
    assert model.training
