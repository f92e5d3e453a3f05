"""Measure the models of an experiment's runs, question by question."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chambers.experiment.plan import Experiment, Measure, Run
from chambers.experiment.questions import Group
from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import read_adapter
from finetuning.data.batching import collate
from finetuning.data.candidates import Continuation
from finetuning.data.prompts import tokenize_prompts
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.generation import generate_texts
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model, locate, reference
from finetuning.model.whole_model import WholeModel
from finetuning.settings import ModelSettings

GLOBAL, BASE = "global", "base"
_BATCH = 16
_MAX_TOKENS = 8192
_MAX_LENGTH = 2048
_NEW_TOKENS = 32


@dataclass(frozen=True)
class Record:
    """The values of one model on one group of questions.

    Attributes:
        arm: Name of the arm.
        model: ``base``, ``global``, or the client whose model it is.
        seed: Seed of the run.
        group: Client whose questions they are.
        measure: ``article`` (whether the right one of twelve is the likeliest), ``answer`` (whether
            greedy decoding gives the reference) or ``loss`` (nats per token of the reference).
        values: One value for each question.

    """

    arm: str
    model: str
    seed: int
    group: str
    measure: Measure
    values: list[float]


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
    models = [Model(run.arm, run.client or GLOBAL, adapters / "global")]
    if experiment.arms[run.arm].personalised:
        clients = sorted(each.name for each in (adapters / "clients").iterdir() if each.is_dir())
        models += [Model(run.arm, name, adapters / "clients" / name) for name in clients]
    return models


class Measuring:
    """Measures models with one base model.

    Args:
        settings: The base model.
        measures: What is measured.

    """

    def __init__(self, settings: ModelSettings, measures: Sequence[Measure]) -> None:
        self._settings = settings
        self._measures = measures
        self._directory = locate(settings.name)
        base = load_base_model(settings)
        self._model, self._tokenizer = base.model, base.tokenizer

    def records(self, model: Model, seed: int, groups: Sequence[Group]) -> Iterator[Record]:
        """Yield the values of a model on each group of questions."""
        with self._opened(model) as whole:
            for group in groups:
                for measure in self._measures:
                    values = _MEASURES[measure](whole, self._tokenizer, group)
                    yield Record(model.arm, model.name, seed, group.name, measure, values)

    @contextmanager
    def _opened(self, model: Model) -> Iterator[WholeModel]:
        """Attach a model's adapter to the base model within the block."""
        if model.adapter is None:
            yield WholeModel(self._model)
            return
        saved = read_adapter(model.adapter)
        loadable = reference(self._settings.name, self._directory)
        peft_model = attach_adapter(self._model, saved.settings, loadable)
        load_adapter(peft_model, saved.state)
        yield WholeModel(peft_model)
        is_lora = saved.settings.kind == "lora"
        self._model = peft_model.unload() if is_lora else peft_model.get_base_model()


def _losses(model: WholeModel, tokenizer: Any, group: Group) -> list[float]:
    """Return the mean loss over the target tokens of each question, in nats."""
    examples, _ = tokenize(group.rows, tokenizer, _MAX_LENGTH)
    losses = []
    for example in examples:
        batch = collate([example], tokenizer.pad_token_id)
        (loss,) = model.summed_losses([batch])
        losses.append(loss / len(batch.labels))
    return losses


def _articles(model: WholeModel, tokenizer: Any, group: Group) -> list[float]:
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


def _answers(model: WholeModel, tokenizer: Any, group: Group) -> list[float]:
    """Return for each question whether greedy decoding gives the reference."""
    texts = generate_texts(
        model=model,
        tokenizer=tokenizer,
        prompts=tokenize_prompts(group.rows, tokenizer),
        batch_size=_BATCH,
        max_new=_NEW_TOKENS,
    )
    references = [row.messages[-1]["content"] for row in group.rows]
    return [float(text == expected) for text, expected in zip(texts, references, strict=True)]


_MEASURES: Mapping[Measure, Any] = {"loss": _losses, "article": _articles, "answer": _answers}
