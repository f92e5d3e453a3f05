"""Answers to questions: those of a plain loop over the model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.held_out import held_out_loss
from finetuning.evaluation.scoring import score
from finetuning.model.base_model import load_tokenizer
from finetuning.model.whole_model import WholeModel
from finetuning.settings import DataSettings
from finetuning.tasks.reading import read_questions, read_task_rows
from finetuning.tasks.scoring import answer, majority_class, prepare, score_answers
from finetuning.tasks.tasks import TASKS
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


@pytest.mark.parametrize("end", ["<end>", " <end>", ""])
@pytest.mark.parametrize("name", CLOZE)
def test_candidates_have_the_probabilities_of_a_plain_loop(name, end, model, checkpoint, write):
    """With chat templates that put nothing or, as Llama 2's, a space before the end mark."""
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = TEMPLATE.replace("<end>", end) if end else None
    task = TASKS[name]
    questions = read_questions(write(*rows_of(name)), task)
    expected = []
    for question in questions:
        sums = []
        for candidate in question.candidates:
            if end:
                prompt = f"<start>user\n{question.prompt}{end}\n<start>assistant\n"
            else:
                prompt = f"Instruction Input:\n{question.prompt}\nInstruction Output:\n"
            before = tokenizer(prompt).input_ids
            after = tokenizer(candidate).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])
            sums.append(float(chosen.sum()))
        expected.append(torch.tensor(sums).double())
    prepared = prepare(tokenizer, task, questions, 200)
    for most in (2000, 400):
        found = answer(WholeModel(model), tokenizer, prepared, max_tokens=most, new_tokens=6)
        assert found.texts == [
            question.candidates[int(sums.argmax())]
            for question, sums in zip(questions, expected, strict=True)
        ]
        right = [
            sum(
                float(p)
                for candidate, p in zip(question.candidates, sums.softmax(0), strict=True)
                if candidate in question.answers
            )
            for question, sums in zip(questions, expected, strict=True)
        ]
        assert found.probabilities == pytest.approx(right, abs=1e-4)
    scores = score_answers(task, questions, found)
    assert scores.keys() >= majority_class(task, questions).keys()
    assert ("probability" in scores) == task.has_words
    if task.has_words:
        assert scores["probability"] == pytest.approx(sum(right) / len(right), abs=1e-4)


@pytest.mark.parametrize("end", ["<end>", " <end>", ""])
@pytest.mark.parametrize("name", CLOZE)
def test_the_loss_of_right_answers_is_that_of_rows_to_train_on(name, end, model, checkpoint, write):
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.chat_template = TEMPLATE.replace("<end>", end) if end else None
    file, task, whole = write(*rows_of(name)), TASKS[name], WholeModel(model)
    examples, _ = tokenize(read_task_rows(file, DataSettings(task=name)), tokenizer, 200)
    expected = held_out_loss(whole, examples, tokenizer.pad_token_id, 4).loss
    prepared = prepare(tokenizer, task, read_questions(file, task), 200)
    for most in (2000, 400):
        found = answer(whole, tokenizer, prepared, max_tokens=most, new_tokens=6, with_loss=True)
        assert found.loss == pytest.approx(expected, abs=1e-5)
    alone = answer(whole, tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert alone.loss is None
    assert alone.texts == found.texts
    assert alone.probabilities == pytest.approx(found.probabilities, abs=1e-4)


class Indifferent:
    """A model to which all tokens are equally likely."""

    columns_before = 0

    def log_probabilities(self, batch):
        return torch.full((len(batch.labels),), -1.0), torch.ones(len(batch.labels)).bool()


def test_of_equally_likely_answers_the_first_is_chosen(checkpoint, write):
    questions = read_questions(write(ROWS["cb"]), TASKS["cb"])
    tokenizer = load_tokenizer(checkpoint)
    vocabulary = {text: len(tokenizer(text).input_ids) for text in ("yes", "no", "maybe")}
    prepared = prepare(tokenizer, TASKS["cb"], questions, 200)
    found = answer(Indifferent(), tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert found.texts == [min(vocabulary, key=vocabulary.__getitem__)]


def test_all_right_answers_share_the_probability(checkpoint, write):
    """A model that knows nothing finds the second one likely enough to be seen in the sum."""
    (question,) = read_questions(write(ROWS["record"]), TASKS["record"])
    assert question.answers == ("Bo", "Bo Lee")
    tokenizer = load_tokenizer(checkpoint)
    lengths = [len(tokenizer(text).input_ids) for text in question.candidates]
    shares = dict(
        zip(question.candidates, torch.tensor(lengths).neg().double().softmax(0), strict=True)
    )
    prepared = prepare(tokenizer, TASKS["record"], [question], 200)
    found = answer(Indifferent(), tokenizer, prepared, max_tokens=2000, new_tokens=6)
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
    prepared = prepare(tokenizer, TASKS[name], questions, 200)
    found = answer(WholeModel(model), tokenizer, prepared, max_tokens=2000, new_tokens=6)
    assert found.texts == expected
    scores = score(expected, [question.answers[0] for question in questions])
    for metric, value in score_answers(TASKS[name], questions, found).items():
        assert value == scores[metric]
