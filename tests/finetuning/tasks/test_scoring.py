"""Answers to questions equal those of a plain loop over the model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.scoring import score
from finetuning.model.tokenizer import load_tokenizer
from finetuning.tasks.reading import read_questions
from finetuning.tasks.scoring import answer_questions, prepare_questions, score_answers
from finetuning.tasks.tasks import TASKS
from finetuning.whole_model import WholeModel
from tests.finetuning.tasks.conftest import ROWS

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
CLOZE = [name for name, task in TASKS.items() if task.is_cloze]


@pytest.fixture(scope="module")
def model(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def rows_of(name):
    """Return some rows of a task that differ in every text."""
    text = json.dumps(ROWS[name])
    changed = [text.replace("He ", f"She {n} ").replace("A b", f"A {n} b") for n in range(3)]
    return [ROWS[name], *map(json.loads, changed)]


class Indifferent:
    """A model to which all tokens are equally likely."""

    columns_before = 0

    def log_probabilities(self, batch):
        values = torch.full((len(batch.labels),), -1.0)
        return values, batch.labels[:, None], values[:, None]


def test_of_equally_likely_answers_the_first_is_chosen(checkpoint, write):
    questions = read_questions(write(ROWS["cb"]), TASKS["cb"])
    tokenizer = load_tokenizer(checkpoint)
    vocabulary = {text: len(tokenizer(text).input_ids) for text in ("yes", "no", "maybe")}
    prepared = prepare_questions(tokenizer, TASKS["cb"], questions, 200)
    found = answer_questions(Indifferent(), tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert found.texts == [min(vocabulary, key=vocabulary.__getitem__)]


def test_all_right_answers_share_the_probability(checkpoint, write):
    """For an indifferent model, the second right answer contributes noticeably to the sum."""
    (question,) = read_questions(write(ROWS["record"]), TASKS["record"])
    assert question.answers == ("Bo", "Bo Lee")
    tokenizer = load_tokenizer(checkpoint)
    lengths = [len(tokenizer(text).input_ids) for text in question.candidates]
    shares = dict(
        zip(question.candidates, torch.tensor(lengths).neg().double().softmax(0), strict=True)
    )
    prepared = prepare_questions(tokenizer, TASKS["record"], [question], 200)
    found = answer_questions(Indifferent(), tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert shares["Bo Lee"] > 1e-3
    assert found.probabilities == pytest.approx([float(shares["Bo"] + shares["Bo Lee"])])


@pytest.mark.parametrize("name", ["xsum", "huatuo"])
def test_texts_are_generated_greedily(name, model, checkpoint, write):
    tokenizer = load_tokenizer(checkpoint)
    questions = read_questions(write(*rows_of(name)), TASKS[name])
    expected = []
    for tokens in tokenize_prompts(prompt_rows([q.prompt for q in questions]), tokenizer):
        output = model.generate(tokens[None], do_sample=False, max_new_tokens=6)
        expected.append(
            tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True).strip()
        )
    prepared = prepare_questions(tokenizer, TASKS[name], questions, 200)
    found = answer_questions(WholeModel(model), tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert found.texts == expected
    scores = score(expected, [question.answers[0] for question in questions])
    for metric, value in score_answers(TASKS[name], questions, found).items():
        assert value == scores[metric]
