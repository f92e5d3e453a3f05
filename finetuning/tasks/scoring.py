"""Answer a task's questions with a model, and score the answers."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from finetuning.data.candidates import Continuation
from finetuning.data.formats import DataError
from finetuning.data.layouts import question_and_answer
from finetuning.data.prompts import prompt_rows
from finetuning.data.rows import Row
from finetuning.data.tokenization import Example, tokenize
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.model.interface import TextModel
from finetuning.progress import progress_bar
from finetuning.tasks.question import Question
from finetuning.tasks.tasks import Task

# Maximum number of texts generated together; more would only add padding.
_TEXTS_AT_ONCE = 64


@dataclass(frozen=True)
class Prepared:
    """Questions as tokens."""

    task: Task
    questions: Sequence[Question]
    candidates: list[list[Continuation]]  # of each question, if the task has candidates
    prompts: list[torch.Tensor]  # (tokens,) int64 each, if the task has no candidates

    @property
    def longest(self) -> tuple[int, str]:
        """Token count of the longest text, without a generated answer, and the text's origin."""
        if self.prompts:
            lengths = [len(prompt) for prompt in self.prompts]
        else:
            lengths = [max(len(c.context) + len(c.answer) for c in own) for own in self.candidates]
        origins = [question.origin for question in self.questions]
        return max(zip(lengths, origins, strict=True))


@dataclass(frozen=True)
class Answers:
    """A model's answers to questions."""

    texts: list[str]  # the chosen candidate, or the generated text, of each question
    # Normalised probability of each question's right candidate (FL-GLM section 4.1.2); empty for
    # generated texts, and 0 where no candidate is right.
    probabilities: list[float]


def prepare_questions(
    tokenizer: Any, task: Task, questions: Sequence[Question], prompt_length: int
) -> Prepared:
    """Convert questions to tokens.

    Prompts for generation are truncated at the end to ``prompt_length`` tokens; cloze questions are
    never truncated. Raise a DataError if the chat template rejects a question.
    """
    if task.is_cloze:
        candidates = _continuations(questions, tokenizer)
        return Prepared(task=task, questions=questions, candidates=candidates, prompts=[])
    rows = prompt_rows([question.prompt for question in questions])
    examples, report = tokenize(rows, tokenizer, prompt_length)
    if report.left_out:
        raise DataError(f"{report.left_out} prompts don't fit in {prompt_length} tokens")
    if report.cut:
        print(f"prompts truncated to {prompt_length} tokens: {report.cut}", file=sys.stderr)
    prompts = [example.tokens[: example.prompt_length] for example in examples]
    return Prepared(task=task, questions=questions, candidates=[], prompts=prompts)


def answer_questions(
    model: TextModel, tokenizer: Any, prepared: Prepared, max_tokens: int, new_tokens: int
) -> Answers:
    """Answer questions.

    The first candidate with the largest summed log-probability is chosen (FL-GLM section 4.1.2).
    Without candidates, the answer is generated greedily, with at most ``new_tokens`` tokens. A
    batch has at most ``max_tokens`` padded tokens, including prefixes and answers. Raise a
    DataError if a question with a candidate doesn't fit.
    """
    if prepared.task.is_cloze:
        return _choose(
            model=model, padding=tokenizer.pad_token_id, prepared=prepared, max_tokens=max_tokens
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
    """Return the metrics and, if candidates are words, the mean probability of the right one."""
    metrics = task.metrics(questions, answers.texts)
    if task.has_words:
        metrics["probability"] = sum(answers.probabilities) / len(answers.probabilities)
    return metrics


def majority_class(task: Task, questions: Sequence[Question]) -> dict[str, float]:
    """Return the metrics of always answering with the most frequent class; {} without classes."""
    if not task.has_classes:
        return {}
    return task.metrics(questions, majority_answers(questions))


def majority_answers(questions: Sequence[Question]) -> list[str]:
    """Return the answers of the most frequent class: each question's candidate, or ""."""
    # A class is the index of a candidate, or None if no candidate is right.
    right = [q.candidates.index(q.answers[0]) if q.answers else None for q in questions]
    ((majority, _),) = Counter(right).most_common(1)
    return ["" if majority is None else q.candidates[majority] for q in questions]


def _continuations(questions: Sequence[Question], tokenizer: Any) -> list[list[Continuation]]:
    """Return the tokens of each question's candidates, without end marks."""
    rows = [
        Row(question_and_answer(question.prompt, text), question.origin, fields={})
        for question in questions
        for text in question.candidates
    ]
    examples, _ = tokenize(rows, tokenizer)
    marks = torch.tensor(sorted(tokenizer.added_tokens_decoder))
    remaining = iter(examples)
    return [
        [_continuation(next(remaining), marks, tokenizer) for _ in question.candidates]
        for question in questions
    ]


def _continuation(example: Example, marks: torch.Tensor, tokenizer: Any) -> Continuation:
    answer = example.tokens[example.prompt_length :]
    answer = answer[example.is_target[example.prompt_length :]]
    others = (~torch.isin(answer, marks)).nonzero()
    if not len(others):
        raise DataError(f"{example.origin}: an answer has no tokens")
    end = int(others[-1]) + 1
    # Some chat templates put whitespace before the end mark.
    while end > 1 and not tokenizer.decode(answer[end - 1 : end]).strip():
        end -= 1
    return Continuation(context=example.tokens[: example.prompt_length], answer=answer[:end])


def _choose(model: TextModel, padding: int, prepared: Prepared, max_tokens: int) -> Answers:
    pairs = zip(prepared.questions, prepared.candidates, strict=True)
    # Group questions of the same line, which share most of their prompts, such as a passage.
    by_line = groupby(pairs, key=lambda pair: pair[0].origin)
    likelihoods_of_lines = log_probabilities(
        model=model,
        groups=[[c for _, candidates in line for c in candidates] for _, line in by_line],
        padding=padding,
        max_tokens=max_tokens,
    )
    likelihoods = chain.from_iterable(likelihoods_of_lines)
    texts, probabilities = [], []
    for question in prepared.questions:
        sums = [next(likelihoods).log_probability for _ in question.candidates]
        texts.append(question.candidates[sums.index(max(sums))])
        shares = torch.tensor(sums, dtype=torch.float64).softmax(0).tolist()
        candidates = zip(question.candidates, shares, strict=True)
        probabilities.append(math.fsum(p for text, p in candidates if text in question.answers))
    return Answers(texts, probabilities)
