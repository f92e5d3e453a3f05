"""Measure the models of an experiment's runs, question by question."""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from chambers.experiment.plan import Experiment, Measure, Run
from chambers.experiment.questions import Group, group_name
from chambers.experiment.records import (
    BASE,
    CONSTANT,
    GLOBAL,
    Record,
    read_about,
    read_records,
    write_records,
)
from federation.run_config import RunConfig
from federation.run_folder import METRICS
from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import read_adapter
from finetuning.data.candidates import Continuation
from finetuning.data.prompts import tokenize_prompts
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.evaluation.scoring import score
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model, locate, reference
from finetuning.model.whole_model import WholeModel
from finetuning.tasks.scoring import answer, prepare
from finetuning.tasks.tasks import TASKS

_BATCH = 16
_MAX_TOKENS = 8192
_REPORTED: Collection[Measure] = {"distance", "penalty_gradient_share"}


def constant_records(
    seed: int, groups: Sequence[Group], measures: Collection[Measure]
) -> Iterator[Record]:
    """Yield the best scores of a single answer to all questions of a group."""
    for group in groups:
        count = len(group.rows)
        if "article" in measures:
            values = [1 / len(matters.MATTERS)] * count
            yield Record(CONSTANT, BASE, seed, group.name, "article", values)
        if "accuracy" in measures:
            ((best, _),) = Counter(a for q in group.questions for a in q.answers).most_common(1)
            values = [float(best in question.answers) for question in group.questions]
            yield Record(CONSTANT, BASE, seed, group.name, "accuracy", values)


@dataclass(frozen=True)
class Model:
    """A model to measure.

    Attributes:
        arm: Name of its arm.
        name: ``base``, ``global``, or the client whose model it is.
        adapter: Folder of its adapter; None for the base model.

    """

    arm: str
    name: str
    adapter: Path | None


def models_of(experiment: Experiment, run: Run, directory: Path) -> list[Model]:
    """Return the models that a completed run has left."""
    adapters = directory / "adapters"
    name = group_name(run.variant, run.client) if run.client else GLOBAL
    models = [Model(run.arm, name, adapters / "global")]
    if experiment.arms[run.arm].personalised:
        folders = sorted(each for each in (adapters / "clients").iterdir() if each.is_dir())
        models += [Model(run.arm, group_name(run.variant, f.name), f) for f in folders]
    return models


def measures_of(experiment: Experiment, arm: str) -> list[Measure]:
    """Return what the tables show of an arm."""
    tables = [t for t in experiment.tables if arm in t.arms or arm == t.against]
    return sorted({table.measure for table in tables})


def measure_run(
    experiment: Experiment, run: Run, directory: Path, config: RunConfig, groups: Sequence[Group]
) -> list[Record]:
    """Return the values of a run's models, which are kept beside it and not computed again."""
    wanted = measures_of(experiment, run.arm)
    measures = [measure for measure in wanted if measure not in _REPORTED]
    about = {"measures": measures, "questions": {g.name: len(g.rows) for g in groups}}
    file = directory.parent / "measured.jsonl"
    if not file.is_file() or read_about(file) != about:
        measuring, models = Measuring(config), models_of(experiment, run, directory)
        found = [m for each in models for m in measuring.records(each, run.seed, groups, measures)]
        write_records(file, about, found)
    reported = [measure for measure in wanted if measure in _REPORTED]
    return [*read_records(file), *_reported(run, directory, reported)]


def _reported(run: Run, directory: Path, measures: Sequence[Measure]) -> Iterator[Record]:
    """Yield the means over rounds of what each client reported about its training."""
    lines = (directory / METRICS).read_text(encoding="utf-8").splitlines()
    trained = [event for event in map(json.loads, lines) if event["event"] == "train"]
    for measure in measures:
        for client in sorted({event["client"] for event in trained}):
            values = [e[measure] for e in trained if e["client"] == client and measure in e]
            group = group_name(run.variant, client)
            if values:
                yield Record(run.arm, GLOBAL, run.seed, group, measure, [mean(values)])


def measure_untrained(
    experiment: Experiment, seed: int, config: RunConfig, groups: Sequence[Group]
) -> list[Record]:
    """Return the values of the base model, and of the same answer to every question."""
    measures = {name: measures_of(experiment, name) for name in experiment.arms}
    records = list(constant_records(seed, groups, set().union(*measures.values())))
    arms = [name for name, arm in experiment.arms.items() if not arm.trained]
    if arms:
        measuring = Measuring(config)
        for name in arms:
            model, own = Model(name, BASE, None), [m for m in measures[name] if m not in _REPORTED]
            records += measuring.records(model, seed, groups, own)
    return records


class Measuring:
    """Measures models with one base model.

    Args:
        config: Settings of the runs.

    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._directory = locate(config.model.name)
        base = load_base_model(config.model)
        self._model, self._tokenizer = base.model, base.tokenizer

    def records(
        self, model: Model, seed: int, groups: Sequence[Group], measures: Sequence[Measure]
    ) -> Iterator[Record]:
        """Yield the values of a model on each group of questions."""
        with self._opened(model) as whole:
            for group in groups:
                for measure, values in self._values(whole, group, measures).items():
                    yield Record(model.arm, model.name, seed, group.name, measure, values)

    def _values(
        self, model: WholeModel, group: Group, measures: Sequence[Measure]
    ) -> dict[Measure, list[float]]:
        values: dict[Measure, list[float]] = {}
        for measure in measures:
            if measure in _MEASURES:
                values[measure] = _MEASURES[measure](model, self._tokenizer, group, self._config)
        rest = [measure for measure in measures if measure not in _MEASURES]
        return values | (self._of_texts(model, group, rest) if rest else {})

    def _of_texts(
        self, model: WholeModel, group: Group, measures: Sequence[Measure]
    ) -> dict[Measure, list[float]]:
        """Return values of the texts that greedy decoding gives."""
        texts = generate_texts(
            model=model,
            tokenizer=self._tokenizer,
            prompts=tokenize_prompts(group.rows, self._tokenizer),
            batch_size=_BATCH,
            max_new=self._config.evaluate.max_new_tokens,
        )
        pairs = [
            (text, r.messages[-1]["content"]) for text, r in zip(texts, group.rows, strict=True)
        ]
        scores = [{"answer": float(a == b)} | score([a], [b]) for a, b in pairs]
        return {measure: [each[measure] for each in scores] for measure in measures}

    @contextmanager
    def _opened(self, model: Model) -> Iterator[WholeModel]:
        """Attach a model's adapter to the base model within the block."""
        if model.adapter is None:
            yield WholeModel(self._model)
            return
        saved = read_adapter(model.adapter)
        loadable = reference(self._config.model.name, self._directory)
        peft_model = attach_adapter(self._model, saved.settings, loadable)
        load_adapter(peft_model, saved.state)
        yield WholeModel(peft_model)
        is_lora = saved.settings.kind == "lora"
        self._model = peft_model.unload() if is_lora else peft_model.get_base_model()


def _losses(model: WholeModel, tokenizer: Any, group: Group, config: RunConfig) -> list[float]:
    """Return the mean loss over the tokens of each reference and its end mark, in nats."""
    examples, _ = tokenize(group.rows, tokenizer, config.data.max_length)
    references = [
        Continuation(e.tokens[: e.prompt_length], e.tokens[e.prompt_length :][is_target])
        for e in examples
        for is_target in (e.is_target[e.prompt_length :],)
    ]
    found = log_probabilities(
        model=model,
        groups=[[each] for each in references],
        padding=tokenizer.pad_token_id,
        max_tokens=_MAX_TOKENS,
    )
    pairs = zip(found, references, strict=True)
    return [-one.log_probability / len(reference.answer) for (one,), reference in pairs]


def _articles(model: WholeModel, tokenizer: Any, group: Group, _config: RunConfig) -> list[float]:
    """Return for each question whether the right Article is the likeliest of all."""
    answers = {
        number: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        for number, text in matters.beginnings().items()
    }
    prompts = tokenize_prompts(group.rows, tokenizer)
    found = log_probabilities(
        model=model,
        groups=[[Continuation(prompt, each) for each in answers.values()] for prompt in prompts],
        padding=tokenizer.pad_token_id,
        max_tokens=_MAX_TOKENS,
    )
    numbers = list(answers)
    chosen = [
        numbers[max(range(len(each)), key=lambda i: each[i].log_probability)] for each in found
    ]
    return [float(a == b) for a, b in zip(chosen, group.articles, strict=True)]


def _correct(model: WholeModel, tokenizer: Any, group: Group, config: RunConfig) -> list[float]:
    """Return for each question of a task whether a right candidate is the likeliest of all."""
    task = TASKS[config.data.task]
    prepared = prepare(tokenizer, task, group.questions, config.data.max_length)
    texts = answer(model, tokenizer, prepared, _MAX_TOKENS, new_tokens=0).texts
    return [float(a in q.answers) for a, q in zip(texts, group.questions, strict=True)]


_MEASURES: Mapping[Measure, Any] = {"loss": _losses, "article": _articles, "accuracy": _correct}
