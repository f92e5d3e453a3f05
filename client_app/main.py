"""The ClientApp: answers query, train and evaluate messages."""

import time
from collections.abc import Callable
from functools import wraps
from logging import ERROR, INFO
from pathlib import Path
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_app import fedjudge, fl_glm
from client_app.institution import Institution, open_institution
from client_app.state import ClientState
from client_app.task import Metrics, Task
from finetuning.adapters.adapter import State
from finetuning.data.rows import DataError
from finetuning.model.base_model import BaseModelError
from finetuning.model.fingerprint import digest
from finetuning.training.loop import DeadlineError
from split.protocol.errors import LaneError
from strategies.messages import SIZE, Instruction, answer, from_arrays, one_line, to_arrays
from strategies.run_config import ConfigError, RunConfig, parse_run_config

app = ClientApp()


class Strategy(Protocol):
    """The client's half of a strategy, one module each."""

    def base_model(self, config: RunConfig) -> tuple[Path, dict[str, str]]:
        """Return the directory and the fingerprint of the client's part of the base model."""
        ...

    def train(self, task: Task) -> tuple[State, Metrics]:
        """Train for one round; return the local adapter and metrics."""
        ...

    def evaluate(self, task: Task) -> tuple[Metrics, State | None]:
        """Return metrics named ``<model>.<metric>``, and J if it was requested."""
        ...


_STRATEGIES: dict[str, Strategy] = {
    "fedjudge-base": fedjudge,
    "fedjudge-cl": fedjudge,
    "fl-glm": fl_glm,
}
Handler = Callable[[Message, Context], Message]
# Errors that a user can correct. Any other is a bug: Flower reports a traceback.
_PROBLEMS = (
    BaseModelError,
    ConfigError,
    DataError,
    DeadlineError,
    FloatingPointError,
    LaneError,
    OSError,
)


def _reporting_problems(handler: Handler) -> Handler:
    """Reply with the error's text if the handler raises one that a user can correct."""

    @wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except _PROBLEMS as error:
            problem = one_line(str(error))  # it may quote the server
            log(ERROR, "%s", problem)
            name = str(context.node_config.get("name", ""))
            return answer(message, {"name": name, "problem": problem})

    return handle


@app.query()
@_reporting_problems
def query(message: Message, context: Context) -> Message:
    """Check all data; reply with the client's name, data size and base model."""
    _, institution = _open(context)
    return answer(
        message,
        {
            "name": institution.name,
            "tensors": list(institution.fingerprint),
            "digests": list(institution.fingerprint.values()),
        },
        {SIZE: institution.size, "test-examples": len(institution.test)},
    )


@app.train()
@_reporting_problems
def train(message: Message, context: Context) -> Message:
    """Train from the global adapter on private data, and reply with the local adapter."""
    task = _task(message, context)
    adapter, metrics = _STRATEGIES[task.config.strategy].train(task)
    return _reply(task, metrics, adapter)


@app.evaluate()
@_reporting_problems
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate models on held-out data, and compute J if the message requests it."""
    task = _task(message, context)
    metrics, importance = _STRATEGIES[task.config.strategy].evaluate(task)
    return _reply(task, metrics, importance)


def _open(context: Context) -> tuple[RunConfig, Institution]:
    config = parse_run_config(context.run_config)
    base_model = _STRATEGIES[config.strategy].base_model
    return config, open_institution(config, context.node_config, base_model)


def _task(message: Message, context: Context) -> Task:
    """Prepare for a train or evaluate message.

    Raises:
        BaseModelError: The base model here is not the run's.

    """
    started = time.monotonic()
    instruction = Instruction.of(message)
    config, institution = _open(context)
    if digest(institution.fingerprint) != instruction.base:
        raise BaseModelError(
            f"the base model in {institution.directory} is not the run's: it was changed or "
            "replaced"
        )
    log(INFO, "%s is ready in %.1f s", institution.name, time.monotonic() - started)
    return Task(
        message=message,
        instruction=instruction,
        config=config,
        institution=institution,
        state=ClientState(config.state_path, instruction.lineage, institution.name),
        arrays={name: from_arrays(a) for name, a in message.content.array_records.items()},
        # Reading and tokenizing also count towards the client's time.
        deadline=started + instruction.time_limit,
    )


def _reply(task: Task, metrics: Metrics, arrays: State | None) -> Message:
    return answer(
        message=task.message,
        config={"name": task.institution.name, "base": task.instruction.base},
        metrics={SIZE: task.institution.size, **metrics},
        arrays=None if arrays is None else to_arrays(arrays),
    )
