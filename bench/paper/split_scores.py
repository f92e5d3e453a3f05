"""A split model's answers and losses beside the whole model's, with a float32 wire."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.job import LIFETIME, Job, load_body, load_ends, load_whole, opened, serving
from bench.paper.cells import Result, SplitCell
from bench.paper.sizes import Size
from bench.paper.sources import Sources
from bench.paper.task_data import TaskData, write_task
from bench.paper.task_settings import training_of
from bench.shape import Shape
from finetuning.adapters.adapter import State, load_adapter
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_tokenizer, locate
from finetuning.model.whole_model import WholeModel
from finetuning.tasks.scoring import Answers, answer, score_answers
from split.client.split_model import SplitModel
from split.model.adapters import take_apart
from split.model.partition import PartyName
from split.settings import SplitSettings

# Texts computed at once.
_ROWS = 16
_SPLIT = SplitSettings(wire_dtype="float32")
_BARE, _TUNED, _CLIENT = "base", "tuned", "client"
# Standard deviation of what is added to the initial adapter, which alone changes nothing.
_DEVIATION = 0.05


def settings_of(cell: SplitCell, size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on."""
    training = training_of(cell.task, size)
    return {
        "questions": training.questions,
        "max-length": training.max_length,
        "rows": _ROWS,
        "deviation": _DEVIATION,
    }


def measure(cell: SplitCell, size: Size, sources: Sources) -> Result:
    """Answer a task's questions with the whole model, and over a lane to a block server.

    Returns:
        The number of ``questions``, and by model, "base" and "tuned", whose adapter has random
        weights: ``whole`` and ``split``, each with the task's metrics and the held-out ``loss``,
        the number of ``other answers``, and the largest difference of a right answer's probability
        as ``difference``.

    """
    directory = locate(sources.model(cell.model))
    with TemporaryDirectory() as folder:
        data = write_task(
            task_name=cell.task,
            parts=sources.parts(cell.task),
            model=directory,
            training=training_of(cell.task, size),
            clients=1,
            folder=Path(folder),
        )
    shape = Shape.of_checkpoint(directory, _ROWS, training_of(cell.task, size).max_length)
    job = Job(directory=directory, shape=shape, steps=1, examples=lambda _: [])
    adapter = _random_adapter(job, cell.seed)
    whole = WholeModel(load_whole(job))
    load_adapter(whole.peft_model, adapter)
    found: dict[str, dict[str, tuple[Answers, dict[str, float]]]] = {_BARE: {}, _TUNED: {}}
    with whole.without_adapter():
        found[_BARE]["whole"] = _scores(whole, data, job)
    found[_TUNED]["whole"] = _scores(whole, data, job)
    with _split_model(job, adapter) as (split, ends):
        for name, own in ((_BARE, None), (_TUNED, ends)):
            split.choose(name, own)
            found[name]["split"] = _scores(split, data, job)
    models = {}
    for name, sides in found.items():
        (answers, one), (others, other) = sides["whole"], sides["split"]
        models[name] = {
            "whole": one,
            "split": other,
            "other answers": sum(a != b for a, b in zip(answers.texts, others.texts, strict=True)),
            "difference": max(
                abs(a - b) for a, b in zip(answers.probabilities, others.probabilities, strict=True)
            ),
        }
    return {"questions": len(data.prepared.questions), "models": models}


def _random_adapter(job: Job, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + _DEVIATION * torch.randn(value.shape, generator=generator)
        for name, value in job.state().items()
    }


@contextmanager
def _split_model(job: Job, adapter: State) -> Iterator[tuple[SplitModel, State]]:
    """Serve the middle blocks, and open a lane to them.

    Yields:
        The split model, and the adapters of its head and tail.

    """
    body, ends = load_body(job, _SPLIT), load_ends(job, _SPLIT)
    parts: dict[PartyName, State] = take_apart(adapter, body.partition)
    with serving(
        body=body, job=job, split=_SPLIT, clients=1, max_cached_tokens=job.shape.tokens
    ) as server:
        invitation = server.invite_to_evaluate(
            client=_CLIENT,
            round_number=0,
            models={_BARE: None, _TUNED: parts["body"]},
            lifetime=LIFETIME,
        )
        with opened(ends=ends, invitation=invitation, job=job, split=_SPLIT) as model:
            yield model, parts["head"] | parts["tail"]


def _scores(
    model: WholeModel | SplitModel, data: TaskData, job: Job
) -> tuple[Answers, dict[str, float]]:
    tokenizer, prepared = load_tokenizer(job.directory), data.prepared
    answers = answer(
        model=model,
        tokenizer=tokenizer,
        prepared=prepared,
        max_tokens=job.shape.tokens,
        new_tokens=1,
    )
    loss = held_out_loss(model, data.held_out, tokenizer.pad_token_id, _ROWS // 2).loss
    return answers, {**score_answers(prepared.task, prepared.questions, answers), "loss": loss}
