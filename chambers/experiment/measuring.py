"""Carry out an experiment's runs, and measure their models, question by question."""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import torch

from chambers.experiment.leaks import Attacks
from chambers.experiment.plan import (
    CONSTANT,
    Experiment,
    Leak,
    Measure,
    PlannedRun,
    Reported,
    of_variant,
)
from chambers.experiment.questions import Group, secrets_of
from chambers.experiment.results import BASE, GLOBAL, Record, read_records, write_records
from chambers.experiment.running import carry_out
from federation.run_config import RunConfig
from federation.run_folder import METRICS_FILE, read_events
from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import read_adapter
from finetuning.data.candidates import Continuation
from finetuning.data.prompts import prompts_of_answers, tokenize_prompts
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.log_probabilities import Likelihood, log_probabilities
from finetuning.evaluation.scoring import score
from finetuning.model.base_model import load_base_model
from finetuning.tasks.question import Question
from finetuning.tasks.scoring import answer_questions, majority_answers, prepare_questions
from finetuning.tasks.tasks import TASKS, Task
from finetuning.whole_model import WholeModel

_MAX_TOKENS = 8192
_REPORTED: set[Measure] = set(get_args(Reported))
_LEAKS: set[Measure] = set(get_args(Leak))


def measure_untrained(
    experiment: Experiment, seed: int, config: RunConfig, groups: Sequence[Group], file: Path
) -> list[Record]:
    """Return the values of the base model, and of giving the same answer to every question.

    Those of the base model are stored in a file; see `measure_run`.
    """
    task, measures = TASKS.get(config.data.task), {table.measure for table in experiment.tables}
    records = list(_constant_records(seed, groups, measures, task))
    arms = [name for name, arm in experiment.arms.items() if not arm.trained]
    if arms:
        own = {name: sorted(_measures_of(experiment, name) - _REPORTED) for name in arms}
        about = {"settings": config.flat(), "measures": own, "questions": _digests(groups)}

        def measure() -> Iterator[Record]:
            measuring = Measuring(config.model_copy(update={"seed": seed}))
            for name in arms:
                for value in measuring.values(None, groups, own[name]):
                    yield Record(name, BASE, seed, *value)

        records += _stored(file, about, measure)
    return records


def measure_run(
    experiment: Experiment,
    run: PlannedRun,
    config: RunConfig,
    folder: Path,
    groups: Sequence[Group],
) -> list[Record]:
    """Carry out a run, print that it has finished, and return the values of its models.

    The values are stored beside the run, and are computed again after another run, or if other
    models, measures or questions are wanted.
    """
    directory = carry_out(run, config, folder)
    wanted = _measures_of(experiment, run.arm)
    measures = sorted(wanted - _REPORTED)
    adapters = _adapters(experiment, run, directory)
    about = {
        "run": directory.name,
        "measures": measures,
        "questions": _digests(groups),
        "models": list(adapters),
    }

    def measure() -> Iterator[Record]:
        measuring = Measuring(config)
        for name, adapter in adapters.items():
            for value in measuring.values(adapter, groups, measures):
                yield Record(run.arm, name, run.seed, *value)

    records = _stored(directory.parent / "measured.jsonl", about, measure)
    records += _reported(run, directory, sorted(wanted & _REPORTED))
    print(f"finished: {run.name}", file=sys.stderr)
    return records


def _stored(
    file: Path, about: dict[str, Any], measure: Callable[[], Iterator[Record]]
) -> list[Record]:
    """Return the records that a file stores about something, or else measure and store them."""
    before, records = read_records(file) if file.is_file() else ({}, [])
    if before != about:
        records = list(measure())
        write_records(file, about, records)
    return records


def _digests(groups: Sequence[Group]) -> dict[str, str]:
    """Return the SHA-256 digest of each group's questions, which may be moved to other files."""
    digests = {}
    for group in groups:
        rows = [replace(row, origin="") for row in group.rows]
        questions = [replace(question, origin="") for question in group.questions]
        digests[group.name] = hashlib.sha256(repr((rows, questions)).encode()).hexdigest()
    return digests


class Measuring:
    """Measures models that share one base model."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._base = load_base_model(config.model)
        self._model, self._tokenizer = self._base.model, self._base.tokenizer

    def values(
        self, adapter: Path | None, groups: Sequence[Group], measures: Sequence[Measure]
    ) -> Iterator[tuple[str, Measure, list[float]]]:
        """Yield a model's values on each group; without an adapter, the base model's values."""
        own = {"loss": self._losses, "article": self._articles, "accuracy": self._correct}
        with self._attach(adapter) as model:
            attacks = Attacks(
                model, self._tokenizer, self._config.data.max_length, self._config.seed
            )
            for group in groups:
                if any(measure not in {*own, *_LEAKS} for measure in measures):
                    scores = self._scores_of_texts(model, group)
                for measure in measures:
                    if measure in _LEAKS:
                        secrets = secrets_of(self._config, group.client)
                        found = attacks.values(measure, secrets, group.rows)
                        yield group.name, measure, found
                    elif measure in own:
                        yield group.name, measure, own[measure](model, group)
                    else:
                        yield group.name, measure, [each[measure] for each in scores]

    @contextmanager
    def _attach(self, adapter: Path | None) -> Iterator[WholeModel]:
        """Attach an adapter to the base model within the block."""
        if adapter is None:
            yield WholeModel(self._model)
            return
        saved = read_adapter(adapter)
        peft_model = attach_adapter(self._model, saved.settings, self._base.reference)
        load_adapter(peft_model, saved.state)
        yield WholeModel(peft_model)
        is_lora = saved.settings.kind == "lora"
        self._model = peft_model.unload() if is_lora else peft_model.get_base_model()

    def _losses(self, model: WholeModel, group: Group) -> list[float]:
        """Return each reference's mean loss over its tokens and the end token, in nats."""
        examples, _ = tokenize(group.rows, self._tokenizer, self._config.data.max_length)
        references = []
        for example in examples:
            prompt, rest = example.tokens.tensor_split([example.prompt_length])
            references.append(Continuation(prompt, rest[example.is_target[len(prompt) :]]))
        scored = self._log_probabilities(model, [[each] for each in references])
        pairs = zip(scored, references, strict=True)
        return [-one.log_probability / len(reference.answer) for (one,), reference in pairs]

    def _articles(self, model: WholeModel, group: Group) -> list[float]:
        """Return whether the right Article is the likeliest, for each question."""
        texts = list(group.beginnings.values())
        tokens = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = tokenize_prompts(group.rows, self._tokenizer)
        scored = self._log_probabilities(
            model, [[Continuation(p, torch.tensor(each)) for each in tokens] for p in prompts]
        )
        right = []
        for likelihoods, article in zip(scored, group.articles, strict=True):
            pairs = zip(group.beginnings, likelihoods, strict=True)
            likeliest, _ = max(pairs, key=lambda pair: pair[1].log_probability)
            right.append(float(likeliest == article))
        return right

    def _correct(self, model: WholeModel, group: Group) -> list[float]:
        """Return whether a right candidate is the likeliest, for each question of a task."""
        task, length = TASKS[self._config.data.task], self._config.data.max_length
        prepared = prepare_questions(self._tokenizer, task, group.questions, length)
        texts = answer_questions(model, self._tokenizer, prepared, _MAX_TOKENS, new_tokens=0).texts
        return _right(task, group.questions, texts)

    def _scores_of_texts(self, model: WholeModel, group: Group) -> list[dict[str, float]]:
        """Return the scores of the text that greedy decoding generates for each question."""
        asked = prompts_of_answers(group.rows, self._tokenizer, self._config.data.max_length)
        prompts, new = [each.tokens for each in asked], self._config.evaluate.max_new_tokens
        texts = generate_texts(model, self._tokenizer, prompts, batch_size=16, max_new=new)
        pairs = zip(texts, (each.reference for each in asked), strict=True)
        return [{"answer": float(a == b)} | score([a], [b]) for a, b in pairs]

    def _log_probabilities(
        self, model: WholeModel, groups: Sequence[Sequence[Continuation]]
    ) -> list[list[Likelihood]]:
        return log_probabilities(model, groups, self._tokenizer.pad_token_id, _MAX_TOKENS)


def _measures_of(experiment: Experiment, arm: str) -> set[Measure]:
    """Return the measures that the tables show for an arm."""
    return {table.measure for table in experiment.tables if arm in (*table.arms, table.against)}


def _right(task: Task, questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
    """Return the accuracy of each answer; WSC's also counts a wrong noun that isn't chosen."""
    pairs = zip(questions, answers, strict=True)
    return [task.metrics([q], [a]).get("accuracy", float(a in q.answers)) for q, a in pairs]


def _constant_records(
    seed: int, groups: Sequence[Group], measures: Collection[Measure], task: Task | None
) -> Iterator[Record]:
    """Yield, for each group, the scores of always giving its most frequent right answer."""
    for group in groups:
        if "article" in measures:
            values = [1 / len(group.beginnings)] * len(group.rows)
            yield Record(CONSTANT, BASE, seed, group.name, "article", values)
        if "accuracy" in measures:
            assert task is not None  # accuracy is a measure of tasks
            if task.has_classes:
                answers = majority_answers(group.questions)
            else:
                right = Counter(a for q in group.questions for a in q.answers)
                answers = [right.most_common(1)[0][0]] * len(group.questions)
            values = _right(task, group.questions, answers)
            yield Record(CONSTANT, BASE, seed, group.name, "accuracy", values)


def _adapters(experiment: Experiment, run: PlannedRun, directory: Path) -> dict[str, Path]:
    """Return the folders of a completed run's adapters, keyed by the model's name."""
    adapters = directory / "adapters"
    name = of_variant(run.variant, run.client) if run.client else GLOBAL
    folders_by_model = {name: adapters / "global"}
    if experiment.arms[run.arm].personalised:
        folders = sorted(each for each in (adapters / "clients").iterdir() if each.is_dir())
        folders_by_model |= {of_variant(run.variant, folder.name): folder for folder in folders}
    return folders_by_model


def _reported(run: PlannedRun, directory: Path, measures: Sequence[Measure]) -> Iterator[Record]:
    """Yield each client's reported training measures, averaged over rounds."""
    trained = [each for each in read_events(directory / METRICS_FILE) if each["event"] == "train"]
    for measure in measures:
        for client in sorted({event["client"] for event in trained}):
            values = [e[measure] for e in trained if e["client"] == client and measure in e]
            group = of_variant(run.variant, client)
            if values:
                yield Record(run.arm, GLOBAL, run.seed, group, measure, [mean(values)])
