"""How long training takes by each schedule (FL-GLM section 4.3.1, table 3)."""

import os
import platform
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.paper.cells import Result, TimeCell
from bench.paper.sizes import Size
from bench.paper.sources import Sources
from bench.paper.task_data import write_rows
from bench.paper.task_settings import PATIENT, adapter_of, adapter_values
from federation.run_config import Scalar
from tests.in_process import run_in_process

TASK = "record"
# The first round loads the model, and is not measured.
_ROUNDS = 2


def settings_of(size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on."""
    return {
        "dtype": size.fl_glm.dtype,
        "training": size.fl_glm.time.model_dump(by_alias=True, exclude={"repetitions"}),
        "adapter": adapter_of(size.fl_glm.time.adapter, size).model_dump(by_alias=True),
        "activation-budget": size.fl_glm.activation_budget,
    }


def measure(cell: TimeCell, size: Size, sources: Sources) -> Result:
    """Train two rounds, with one row in each of a client's steps.

    Without a GPU all parties share one core.

    Returns:
        The ``seconds`` of the second round, and its ``rows``.

    """
    if not torch.cuda.is_available():
        _use_one_core()
    timed = size.fl_glm.time
    steps = max(1, timed.rows // cell.clients)
    split: dict[str, Scalar] = {}
    if cell.method != "centralised":
        split = {
            "split.schedule": cell.method,
            "split.activation-budget": size.fl_glm.activation_budget,
        }
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_rows(TASK, sources.parts(TASK), cell.clients, folder)
        values = {
            "strategy": "fl-glm" if split else "fedjudge-base",
            "rounds": _ROUNDS,
            "seed": cell.seed,
            "model.name": sources.model(timed.model),
            "model.dtype": size.fl_glm.dtype,
            **adapter_values(timed.adapter, size),
            "data.path": str(folder),
            "data.task": TASK,
            "data.max-length": timed.max_length,
            "train.local-steps": steps,
            "train.batch-size": 1,
            "train.accumulation": 1,
            "train.optimizer-state": "keep",
            "evaluate.every": _ROUNDS,
            **PATIENT,
            **split,
        }
        journal = run_in_process(
            values,
            state_path=folder / "state",
            clients=cell.clients,
            together=cell.method in ("client-batch", "hierarchical"),
        )
    (seconds,) = [
        event["seconds"]
        for event in journal.events
        if event["event"] == "round" and event["round"] == _ROUNDS
    ]
    return {"seconds": seconds, "rows": steps * cell.clients}


def machine() -> str:
    """Return what computes; durations on other machines can't be compared."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def _use_one_core() -> None:
    """Bind all threads of this process, and those that they start, to the same core.

    PyTorch computes in one thread each: several would wait for each other, spinning, on that core.
    """
    torch.set_num_threads(1)
    core = {max(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), core)
