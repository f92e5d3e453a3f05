"""The run config and the settings of a task's cell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.paper.cells import TaskCell
from bench.paper.sizes import AdapterTraining, Size, TaskTraining
from federation.run_config import Scalar

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


def settings_of(cell: TaskCell, size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on."""
    settings: dict[str, Any] = {
        "dtype": size.fl_glm.dtype,
        "training": training_of(cell.task, size).model_dump(by_alias=True),
    }
    if cell.adapter:
        settings["adapter"] = adapter_of(cell.adapter, size).model_dump(by_alias=True)
    if cell.method not in ("bare", "centralised"):
        settings["activation-budget"] = size.fl_glm.activation_budget
    return settings


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
        split = {
            "split.schedule": cell.method,
            "split.activation-budget": size.fl_glm.activation_budget,
        }
    return {
        "strategy": "fl-glm" if split else "fedjudge-base",
        "rounds": rounds,
        "seed": cell.seed,
        "model.name": model,
        "model.dtype": size.fl_glm.dtype,
        **adapter_values(cell.adapter, size),
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


def adapter_of(kind: str, size: Size) -> AdapterTraining:
    """Return a kind of adapter's settings at a size."""
    return size.fl_glm.prefix if kind == "prefix" else size.fl_glm.lora


def adapter_values(kind: str, size: Size) -> dict[str, Scalar]:
    """Return the part of a run config that concerns the adapter."""
    own = adapter_of(kind, size)
    return {
        "adapter.kind": kind,
        "adapter.prefix-length": own.prefix_length,
        "adapter.rank": own.rank,
        "adapter.alpha": own.alpha,
        "adapter.dropout": 0.0,
        "adapter.targets": own.targets,
        "train.learning-rate": own.learning_rate,
        "train.max-gradient-norm": own.max_gradient_norm,
    }
