"""Train on a task by one of FL-GLM's schedules or centralised, and score the model."""

import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.in_process import MemoryJournal, run_in_process
from bench.paper.cells import Result, TaskCell
from bench.paper.sizes import AdapterTraining, Size, TaskTraining
from bench.paper.sources import Sources
from bench.paper.task_data import TaskData, write_task
from finetuning.adapters.adapter import State, attach_adapter, load_adapter
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_base_model, load_tokenizer, locate
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.tasks.scoring import answer, majority_class, score_answers
from strategies.run_config import Scalar, parse_run_config

# Of padded tokens, prefixes and answers included.
_MOST_TOKENS = 8192
# A slow machine, or one that is busy with other cells, changes no result.
_PATIENCE = 6 * 3600.0
PATIENT: Mapping[str, Scalar] = {
    "round-timeout": _PATIENCE,
    **{f"split.{name}-timeout": _PATIENCE for name in ("join", "gather", "resume", "frame")},
}


def training_of(task: str, size: Size) -> TaskTraining:
    """Return how a task is trained and scored at a size."""
    tasks = size.fl_glm.training
    return tasks.get(task, tasks["default"])


def settings_of(cell: TaskCell, size: Size, sources: Sources) -> dict[str, Any]:
    """Return everything that a cell's result depends on.

    Raises:
        SourceError: Its data is missing.
        BaseModelError: Its model is missing.

    """
    settings: dict[str, Any] = {
        "model": sources.model_digest(cell.model),
        "data": sources.data_digest(cell.task),
        "dtype": size.fl_glm.dtype,
        "training": training_of(cell.task, size).model_dump(by_alias=True),
    }
    if cell.adapter:
        settings["adapter"] = _adapter_of(cell, size).model_dump(by_alias=True)
    return settings


def measure(cell: TaskCell, size: Size, sources: Sources) -> Result:
    """Train, and score the global model.

    Returns:
        ``loss`` of the right answers in nats per token, the task's ``metrics`` and those of the
        most frequent answer as ``majority``, and the numbers of ``questions`` and of rows that were
        chosen from as ``training_rows``. After training also the losses of the first and the last
        round, means over clients, as ``training_loss``; and ``curve``, if the cell has one: rows
        trained on, and metrics.

    """
    training = training_of(cell.task, size)
    name = sources.model(cell.model)
    model_settings = ModelSettings(name=name, dtype=size.fl_glm.dtype)  # type: ignore[arg-type]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = load_tokenizer(locate(name))
        data = write_task(
            task_name=cell.task,
            parts=sources.parts(cell.task),
            tokenizer=tokenizer,
            training=training,
            folder=folder,
        )
        questions = data.prepared.questions
        result: Result = {
            "questions": len(questions),
            "training_rows": data.training_rows,
            "majority": majority_class(data.prepared.task, questions),
        }
        if cell.method == "bare":
            scorer = Scorer(_model(model_settings, None), tokenizer, data, training)
            return result | {"metrics": scorer.metrics(), "loss": scorer.loss()}
        values = run_values(cell, size, name, folder)
        journal = run_in_process(
            values,
            state_path=folder / "state",
            clients=cell.clients,
            together=cell.method == "client-batch",
        )
        adapter = parse_run_config(values).adapter
        scorer = Scorer(_model(model_settings, adapter), tokenizer, data, training)
        last = max(journal.adapters)
        if cell.curve:
            rows = cell.period * training.rows * cell.clients
            result["curve"] = [
                [rows * number, scorer.metrics(journal.adapters[number])]
                for number in range(1, last)
            ]
        result |= {
            "metrics": scorer.metrics(journal.adapters[last]),
            "loss": scorer.loss(),
            "training_loss": [_training_loss(journal, 1), _training_loss(journal, last)],
        }
        return result


class Scorer:
    """Scores a model on a task's held-out questions.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        data: The questions.
        training: Lengths.

    """

    def __init__(
        self, model: WholeModel, tokenizer: Any, data: TaskData, training: TaskTraining
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._data = data
        self._training = training

    def metrics(self, adapter: State | None = None) -> dict[str, float]:
        """Answer the questions, and return the task's metrics.

        Args:
            adapter: The adapter to use from now on; None for the one in use.

        """
        if adapter is not None:
            load_adapter(self._model.peft_model, adapter)
        prepared = self._data.prepared
        answers = answer(
            model=self._model,
            tokenizer=self._tokenizer,
            prepared=prepared,
            most_tokens=_MOST_TOKENS,
            new_tokens=self._training.new_tokens,
        )
        return score_answers(prepared.task, prepared.questions, answers)

    def loss(self) -> float:
        """Return the loss of the right answers, in nats per token."""
        padding = self._tokenizer.pad_token_id
        batch = self._training.micro_batch
        return held_out_loss(self._model, self._data.held_out, padding, batch).loss


def run_values(cell: TaskCell, size: Size, model: str, folder: Path) -> dict[str, Scalar]:
    """Return the run config of a cell.

    Args:
        cell: The cell.
        size: Its size.
        model: ``model.name``.
        folder: Folder with the rows.

    """
    training = training_of(cell.task, size)
    rounds = max(1, round(training.steps / (cell.clients * cell.period)))
    split: dict[str, Scalar] = {}
    if cell.method != "centralised":
        split = {"split.schedule": cell.method}
    return {
        "strategy": "fl-glm" if split else "fedjudge-base",
        "rounds": rounds,
        "seed": cell.seed,
        "model.name": model,
        "model.dtype": size.fl_glm.dtype,
        **_adapter_values(cell, size),
        "data.path": str(folder),
        "data.task": cell.task,
        "data.max-length": training.max_length,
        "data.partition": cell.partition,
        "data.partition-field": "label" if cell.partition == "label" else "",
        "train.local-steps": cell.period,
        "train.batch-size": training.micro_batch,
        "train.accumulation": training.rows // training.micro_batch,
        "train.optimizer-state": "keep",
        **PATIENT,
        **split,
        "evaluate.every": rounds,
        "evaluate.batch-size": training.micro_batch,
    }


def _adapter_of(cell: TaskCell, size: Size) -> AdapterTraining:
    return size.fl_glm.prefix if cell.adapter == "prefix" else size.fl_glm.lora


def _adapter_values(cell: TaskCell, size: Size) -> dict[str, Scalar]:
    own = _adapter_of(cell, size)
    assert cell.adapter
    return {
        "adapter.kind": cell.adapter,
        "adapter.prefix-length": own.prefix_length,
        "adapter.rank": own.rank,
        "adapter.alpha": own.alpha,
        "adapter.dropout": 0.0,
        "adapter.targets": own.targets,
        "train.learning-rate": own.learning_rate,
        "train.max-gradient-norm": own.max_gradient_norm,
    }


# Most cells after each other have the same.
@functools.lru_cache(maxsize=1)
def _model(settings: ModelSettings, adapter: AdapterSettings | None) -> WholeModel:
    base = load_base_model(settings)
    if adapter is None:
        return WholeModel(base.model)
    return WholeModel(attach_adapter(base.model, adapter, base.reference))


def _training_loss(journal: MemoryJournal, number: int) -> float:
    losses = [
        event["loss"]
        for event in journal.events
        if event["event"] == "train" and event["round"] == number
    ]
    return float(statistics.mean(losses))
