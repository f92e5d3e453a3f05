"""Score models on tasks, and print a table of the scores."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from chambers.errors import CommandError
from chambers.model_source import ModelSource
from chambers.models import check_length, load_source
from finetuning.data.formats import DataError
from finetuning.evaluation.bertscore import Encoder, bertscore
from finetuning.model.interface import TextModel
from finetuning.model.tokenizer import load_tokenizer
from finetuning.tasks.question import Question
from finetuning.tasks.scoring import (
    Prepared,
    answer_questions,
    majority_class,
    prepare_questions,
    score_answers,
)
from finetuning.tasks.tasks import TASKS

# Keyed by task: the number of questions, the metrics of the most frequent answer, and each model's
# metrics and duration in seconds.
Scores = dict[str, dict[str, Any]]
# Task names, and the TaskManager of lm-evaluation-harness.
Harness = tuple[Sequence[str], Any]
_MAJORITY = "majority"


@dataclass(frozen=True)
class Scoring:
    """How models are scored."""

    batch_tokens: int  # maximum number of padded tokens processed at once
    prompt_tokens: int  # to which prompts of tasks with generated answers are truncated
    new_tokens: int  # maximum number of tokens per answer
    rows: int | None  # number of rows of each of lm-evaluation-harness' tasks; None for all
    encoder: Encoder | None  # with which BERTScore also scores generated answers
    harness: Harness | None

    def score(
        self,
        sources: Mapping[str, ModelSource],
        questions: Mapping[str, Sequence[Question]],
        scores: Scores,
    ) -> None:
        """Score models one after another on tasks' questions; models and tasks are keyed by name.

        ``scores`` receives each task's scores as soon as they are computed. Raise ``UserError`` if
        a question is too long, or a model can't be used.
        """
        prepared = {name: self._prepare(source, questions) for name, source in sources.items()}
        for model_name, source in sources.items():
            tokenizer, tasks = prepared[model_name]
            with load_source(source) as model:
                for name, tokenized in tasks.items():
                    task, own = tokenized.task, tokenized.questions
                    started = time.perf_counter()
                    answers = answer_questions(
                        model=model,
                        tokenizer=tokenizer,
                        prepared=tokenized,
                        max_tokens=min(self.batch_tokens, source.max_tokens),
                        new_tokens=self.new_tokens,
                    )
                    seconds = time.perf_counter() - started
                    kept = score_answers(task, own, answers) | {"seconds": round(seconds, 3)}
                    if name not in scores:
                        majority = majority_class(task, own)
                        scores[name] = {"questions": len(own), _MAJORITY: majority, "models": {}}
                    scores[name]["models"][model_name] = kept
                    if self.encoder is not None and not task.is_cloze:
                        references = [question.answers[0] for question in own]
                        kept["bertscore"] = bertscore(answers.texts, references, self.encoder)
                of_harness = self._score_with_harness(model, tokenizer, source)
                for name, own_scores in of_harness.items():
                    empty = {"questions": own_scores["questions"], _MAJORITY: {}, "models": {}}
                    scores.setdefault(name, empty)["models"][model_name] = own_scores["metrics"]

    def _prepare(
        self, source: ModelSource, questions: Mapping[str, Sequence[Question]]
    ) -> tuple[Any, dict[str, Prepared]]:
        """Tokenize the questions and check their lengths before weights are loaded."""
        tokenizer = load_tokenizer(source.directory)
        prepared = {}
        for name, own in questions.items():
            task = TASKS[name]
            tokenized = prepared[name] = prepare_questions(
                tokenizer=tokenizer, task=task, questions=own, prompt_length=self.prompt_tokens
            )
            check_length(
                source=source,
                longest=tokenized.longest,
                new_tokens=0 if task.is_cloze else self.new_tokens,
                batch_tokens=self.batch_tokens,
            )
        return tokenizer, prepared

    def _score_with_harness(
        self, model: TextModel, tokenizer: Any, source: ModelSource
    ) -> dict[str, dict[str, Any]]:
        if self.harness is None:
            return {}
        from finetuning.evaluation.harness import HarnessModel, harness_scores, max_positions

        names, manager = self.harness
        positions = max_positions(source.directory, tokenizer) - source.columns_before
        seen = HarnessModel(
            model=model,
            tokenizer=tokenizer,
            max_tokens=min(self.batch_tokens, source.max_tokens),
            max_length=min(positions, source.max_prompt_length),
        )
        try:
            return harness_scores(model=seen, names=names, manager=manager, limit=self.rows)
        except DataError as error:
            raise CommandError(f"{error}; --batch-tokens is {self.batch_tokens}") from error


def print_scores(scores: Scores) -> None:
    """Print a table of the scores; multiply them by 100, except for tasks of the harness."""
    models = list(next(iter(scores.values()))["models"])
    table = Table()
    for column in ("task", "questions", "metric", _MAJORITY, *models):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for name, of_task in scores.items():
        columns = [of_task[_MAJORITY], *of_task["models"].values()]
        metrics = [metric for metric in of_task["models"][models[0]] if metric != "seconds"]
        # Metrics of the harness may be outside 0..1.
        scale, digits = (100, 1) if name in TASKS else (1, 4)
        for metric in metrics:
            values = (f"{scale * v[metric]:.{digits}f}" if metric in v else "" for v in columns)
            table.add_row(name, str(of_task["questions"] or ""), metric, *values)
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    console.print(table)
