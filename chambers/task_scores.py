"""Score models on tasks, and print a table of the scores."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from chambers.errors import CommandError
from chambers.models import Source, opened
from finetuning.data.formats import DataError
from finetuning.evaluation.bertscore import Encoder, EncoderError, bertscore
from finetuning.model.base_model import load_tokenizer
from finetuning.model.positions import check_positions
from finetuning.tasks.question import Question
from finetuning.tasks.scoring import Model, Prepared, answer, majority_class, prepare, score_answers
from finetuning.tasks.tasks import TASKS, Task

# By task: the number of questions, the metrics of the most frequent answer, and the metrics and
# seconds of each model.
Scores = dict[str, dict[str, Any]]
# Task names, and the TaskManager of lm-evaluation-harness.
Harness = tuple[Sequence[str], Any]
_MAJORITY = "majority"


@dataclass(frozen=True)
class Scored:
    """Tasks and limits for ``measure``.

    Attributes:
        questions: Each task and its questions, by task name.
        batch_tokens: Maximum number of padded tokens computed at once.
        prompt_length: Maximum length of a prompt to generate from, in tokens.
        new_tokens: Maximum length of a generated answer, in tokens.
        encoder: Encoder for BERTScore of generated answers; None for no BERTScore.
        harness: Names and manager of tasks in lm-evaluation-harness, if any.
        limit: Maximum number of rows of each harness task; None for all.

    """

    questions: Mapping[str, tuple[Task, Sequence[Question]]]
    batch_tokens: int
    prompt_length: int
    new_tokens: int
    encoder: Encoder | None
    harness: Harness | None
    limit: int | None


def measure(sources: Mapping[str, Source], scored: Scored, scores: Scores) -> None:
    """Score models one after another.

    Args:
        sources: The models by name.
        scored: Tasks and limits.
        scores: Receives the scores of each task as soon as they are computed.

    Raises:
        UserError: A question is too long, or a model can't be used.

    """
    prepared = {name: _prepare(source, scored) for name, source in sources.items()}
    for model_name, source in sources.items():
        tokenizer, tasks = prepared[model_name]
        with opened(source) as model:
            for name, questions in tasks.items():
                started = time.perf_counter()
                answers = answer(
                    model=model,
                    tokenizer=tokenizer,
                    prepared=questions,
                    max_tokens=min(scored.batch_tokens, source.max_tokens),
                    new_tokens=scored.new_tokens,
                )
                seconds = time.perf_counter() - started
                metrics = score_answers(questions.task, questions.questions, answers)
                if name not in scores:
                    task, own = scored.questions[name]
                    majority = majority_class(task, own)
                    scores[name] = {"questions": len(own), _MAJORITY: majority, "models": {}}
                kept = {**metrics, "seconds": round(seconds, 3)}
                scores[name]["models"][model_name] = kept
                if scored.encoder is not None and not questions.task.is_cloze:
                    references = [question.answers[0] for question in questions.questions]
                    kept["bertscore"] = _bertscore(answers.texts, references, scored.encoder)
            if scored.harness is not None:
                for name, found in _harness_scores(
                    model=model, tokenizer=tokenizer, source=source, scored=scored
                ).items():
                    empty = {"questions": found["questions"], _MAJORITY: {}, "models": {}}
                    scores.setdefault(name, empty)["models"][model_name] = found["metrics"]


def _harness_scores(
    model: Model, tokenizer: Any, source: Source, scored: Scored
) -> dict[str, dict[str, Any]]:
    from finetuning.evaluation.harness import HarnessModel, harness_scores, max_positions

    assert scored.harness is not None
    names, manager = scored.harness
    seen = HarnessModel(
        model=model,
        tokenizer=tokenizer,
        max_tokens=min(scored.batch_tokens, source.max_tokens),
        max_length=min(
            max_positions(source.directory, tokenizer) - source.columns_before,
            source.max_prompt_length,
        ),
    )
    try:
        return harness_scores(model=seen, names=names, manager=manager, limit=scored.limit)
    except DataError as error:
        raise CommandError(f"{error}; --batch-tokens is {scored.batch_tokens}") from error


def render(scores: Scores) -> None:
    """Print a table of scores, multiplied by 100 except for those of the harness."""
    models = list(next(iter(scores.values()))["models"])
    table = Table()
    for column in ("task", "questions", "metric", _MAJORITY, *models):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for name, of_task in scores.items():
        found = [of_task[_MAJORITY], *of_task["models"].values()]
        metrics = [metric for metric in of_task["models"][models[0]] if metric != "seconds"]
        for metric in metrics:
            values = (_shown(name, v[metric]) if metric in v else "" for v in found)
            table.add_row(name, str(of_task["questions"] or ""), metric, *values)
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)


def _shown(task: str, value: float) -> str:
    # Metrics of the harness may be outside 0..1.
    return f"{100 * value:.1f}" if task in TASKS else f"{value:.4f}"


def _bertscore(texts: Sequence[str], references: Sequence[str], encoder: Encoder) -> float:
    try:
        return bertscore(texts, references, encoder)
    except EncoderError as error:
        raise CommandError(f"--bertscore: {error}") from error


def _prepare(source: Source, scored: Scored) -> tuple[Any, dict[str, Prepared]]:
    """Tokenize the questions and check their lengths, before loading weights."""
    tokenizer = load_tokenizer(source.directory)
    prepared = {
        name: prepare(
            tokenizer=tokenizer,
            task=task,
            questions=questions,
            prompt_length=scored.prompt_length,
        )
        for name, (task, questions) in scored.questions.items()
    }
    for questions in prepared.values():
        _refuse_too_long(source, questions, scored)
    return tokenizer, prepared


def _refuse_too_long(source: Source, questions: Prepared, scored: Scored) -> None:
    longest, origin = questions.longest
    row = {"the prefix": source.columns_before} if source.columns_before else {}
    row[f"the tokens of {origin}"] = longest
    if not questions.task.is_cloze:
        row["--max-new-tokens"] = scored.new_tokens
    check_positions(source.directory, row)
    if longest > source.max_prompt_length:
        raise CommandError(
            f"{origin} has {longest} tokens, and the block server allows {source.max_prompt_length}"
        )
    for name, most in (
        ("--batch-tokens allows", scored.batch_tokens),
        ("the block server allows", source.max_tokens),
    ):
        if sum(row.values()) > most:
            raise CommandError(
                f"{' and '.join(row)} are {' + '.join(map(str, row.values()))}, and {name} {most}"
            )
