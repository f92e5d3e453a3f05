"""Answer a task's questions with a model, and score the answers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from finetuning.data.candidates import Continuation
from finetuning.data.formats import DataError
from finetuning.data.prompts import prompt_rows
from finetuning.data.rows import Row
from finetuning.data.tokenization import Example, tokenize
from finetuning.evaluation.generation import Answering, generate_texts
from finetuning.evaluation.log_probabilities import Scoring, log_probabilities
from finetuning.progress import progress_bar
from finetuning.tasks.question import Question
from finetuning.tasks.tasks import Task

_NO_LIMIT = 2**31
# Number of texts generated together; more would only add padding.
_TEXTS_AT_ONCE = 64


class Model(Answering, Scoring, Protocol):
    """Interface that tasks require of a whole or split model."""


@dataclass(frozen=True)
class Prepared:
    """Questions as tokens.

    Attributes:
        task: The task.
        questions: Its questions.
        candidates: The candidates of each question, if the task has candidates.
        prompts: Otherwise the prompt of each question, (tokens,) int64.

    """

    task: Task
    questions: Sequence[Question]
    candidates: list[list[Continuation]]
    prompts: list[torch.Tensor]

    @property
    def longest(self) -> tuple[int, str]:
        """Token count of the longest text, without a generated answer, and its origin."""
        if self.prompts:
            lengths = [len(prompt) for prompt in self.prompts]
        else:
            lengths = [max(len(c.context) + len(c.answer) for c in own) for own in self.candidates]
        return max(
            (length, question.origin)
            for length, question in zip(lengths, self.questions, strict=True)
        )


@dataclass(frozen=True)
class Answers:
    """A model's answers to questions.

    Attributes:
        texts: The chosen candidate, or the generated text, of each question.
        probabilities: Normalised probability of each question's right candidate (FL-GLM section
            4.1.2); empty for generated texts, and 0 where no candidate is right.

    """

    texts: list[str]
    probabilities: list[float]


def prepare(
    tokenizer: Any, task: Task, questions: Sequence[Question], prompt_length: int
) -> Prepared:
    """Convert questions to tokens.

    Args:
        tokenizer: Tokenizer of the base model.
        task: The task.
        questions: Its questions.
        prompt_length: Maximum length of a prompt for generation, in tokens; longer ones are
            truncated at the end. Cloze questions are never truncated.

    Raises:
        DataError: The chat template rejects a question.

    """
    if task.is_cloze:
        candidates = _continuations(questions, tokenizer)
        return Prepared(task=task, questions=questions, candidates=candidates, prompts=[])
    rows = prompt_rows([question.prompt for question in questions])
    examples, _ = tokenize(rows, tokenizer, prompt_length)
    prompts = [example.tokens[: example.prompt_length] for example in examples]
    return Prepared(task=task, questions=questions, candidates=[], prompts=prompts)


def answer(
    model: Model,
    tokenizer: Any,
    prepared: Prepared,
    max_tokens: int,
    new_tokens: int,
) -> Answers:
    """Answer questions.

    The candidate with the largest summed log-probability is chosen (FL-GLM section 4.1.2); of equal
    ones, the first. Without candidates, the answer is generated greedily.

    Args:
        model: Model with its adapter.
        tokenizer: Tokenizer of the base model.
        prepared: The questions.
        max_tokens: Maximum number of padded tokens of a batch, prefixes and answers included.
        new_tokens: Maximum length of a generated answer, in tokens.

    Raises:
        DataError: A question is too long.

    """
    if prepared.task.is_cloze:
        return _choose(
            model=model,
            padding=tokenizer.pad_token_id,
            prepared=prepared,
            max_tokens=max_tokens,
        )
    with progress_bar(total=len(prepared.prompts), description="generating") as bar:
        texts = generate_texts(
            model=model,
            tokenizer=tokenizer,
            prompts=prepared.prompts,
            batch_size=_TEXTS_AT_ONCE,
            max_new=new_tokens,
            max_tokens=max_tokens,
            finished=bar.update,
        )
    return Answers(texts, [])


def score_answers(task: Task, questions: Sequence[Question], answers: Answers) -> dict[str, float]:
    """Return the task's metrics, and the mean probability of the right answer if available."""
    metrics = task.metrics(questions, answers.texts)
    if task.has_words:
        metrics["probability"] = sum(answers.probabilities) / len(answers.probabilities)
    return metrics


def majority_class(task: Task, questions: Sequence[Question]) -> dict[str, float]:
    """Return the metrics of always giving the most frequent answer; empty without classes."""
    if not task.has_classes:
        return {}
    # A class is the index of a candidate, or None if no candidate is right.
    right = [q.candidates.index(q.answers[0]) if q.answers else None for q in questions]
    ((most, _),) = Counter(right).most_common(1)
    return task.metrics(questions, ["" if most is None else q.candidates[most] for q in questions])


def _continuations(questions: Sequence[Question], tokenizer: Any) -> list[list[Continuation]]:
    """Return the tokens of each question's candidates, without end marks."""
    rows = [
        Row(
            messages=(
                {"role": "user", "content": question.prompt},
                {"role": "assistant", "content": text},
            ),
            origin=question.origin,
            fields={},
        )
        for question in questions
        for text in question.candidates
    ]
    examples, _ = tokenize(rows, tokenizer, _NO_LIMIT)
    marks = torch.tensor(sorted(tokenizer.added_tokens_decoder))
    found = iter(zip(rows, examples, strict=True))
    return [
        [_continuation(*next(found), marks, tokenizer) for _ in question.candidates]
        for question in questions
    ]


def _continuation(row: Row, example: Example, marks: torch.Tensor, tokenizer: Any) -> Continuation:
    answer = example.tokens[example.is_target]
    others = (~torch.isin(answer, marks)).nonzero()
    if not len(others):
        raise DataError(f"{row.origin}: an answer has no tokens")
    end = int(others[-1]) + 1
    # Some chat templates put whitespace before the end mark.
    while end > 1 and not tokenizer.decode(answer[end - 1 : end]).strip():
        end -= 1
    return Continuation(context=example.tokens[: example.prompt_length], answer=answer[:end])


def _choose(model: Scoring, padding: int, prepared: Prepared, max_tokens: int) -> Answers:
    found = _likelihoods(
        model=model,
        questions=prepared.questions,
        continuations=prepared.candidates,
        padding=padding,
        max_tokens=max_tokens,
    )
    texts, probabilities = [], []
    for question, sums in zip(prepared.questions, found, strict=True):
        texts.append(question.candidates[sums.index(max(sums))])
        shares = torch.tensor(sums, dtype=torch.float64).softmax(0).tolist()
        pairs = zip(question.candidates, shares, strict=True)
        probabilities.append(math.fsum(p for text, p in pairs if text in question.answers))
    return Answers(texts, probabilities)


def _likelihoods(
    model: Scoring,
    questions: Sequence[Question],
    continuations: Sequence[Sequence[Continuation]],
    padding: int,
    max_tokens: int,
) -> list[list[float]]:
    """Return the log-probabilities of each question's continuations."""
    # Questions of one line share most of their prompt, such as a passage.
    groups: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        groups.setdefault(question.origin, []).append(index)
    of_groups = log_probabilities(
        model=model,
        groups=[[c for index in group for c in continuations[index]] for group in groups.values()],
        padding=padding,
        max_tokens=max_tokens,
    )
    found: list[list[float]] = [[]] * len(questions)
    for group, likelihoods in zip(groups.values(), of_groups, strict=True):
        values = iter(likelihoods)
        for index in group:
            found[index] = [next(values).log_probability for _ in continuations[index]]
    return found
