"""The ClientApp: answers query, train and evaluate messages."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from logging import ERROR, INFO

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from client_app.evaluation import evaluate_models
from client_app.institution import Institution, open_institution
from client_app.split import evaluate_split_models, train_ends
from client_app.state import ClientState
from client_app.training import train_adapter
from finetuning.adapters.adapter import State
from finetuning.data.rows import DataError
from finetuning.model.base_model import BaseModelError
from finetuning.model.fingerprint import digest
from finetuning.training.loop import DeadlineError
from split.protocol.errors import LaneError
from strategies.messages import (
    ARRAYS,
    BODY,
    IMPORTANCE,
    SIZE,
    Instruction,
    answer,
    from_arrays,
    invitation_of,
    models_of,
    to_arrays,
)
from strategies.run_config import ConfigError, RunConfig, parse_run_config

app = ClientApp()

Handler = Callable[[Message, Context], Message]
# What a person can mend; anything else is a fault of the program, and Flower reports its traceback.
_PROBLEMS = (
    BaseModelError,
    ConfigError,
    DataError,
    DeadlineError,
    FloatingPointError,
    LaneError,
    OSError,
)


def _says_problems(handler: Handler) -> Handler:
    """Answer with the problem in words where the handler raises one that a person can mend."""

    @wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except _PROBLEMS as error:
            log(ERROR, "%s", error)
            name = str(context.node_config.get("name", ""))
            return answer(message, {"name": name, "problem": str(error)})

    return handle


@app.query()
@_says_problems
def query(message: Message, context: Context) -> Message:
    """Say who this is, how much data there is, and which base model; all data is checked."""
    institution = open_institution(parse_run_config(context.run_config), context.node_config)
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
@_says_problems
def train(message: Message, context: Context) -> Message:
    """Train from the global adapter on private data, and send the local adapter back."""
    instruction, config, institution, state = _open(message, context)
    arrays = message.content.array_records
    if config.strategy == "fl-glm":
        adapter, metrics = train_ends(
            institution,
            config,
            instruction,
            from_arrays(arrays[ARRAYS]),
            state,
            invitation_of(message),
        )
        return _trained(message, institution, instruction, adapter, metrics)
    importance = from_arrays(arrays[IMPORTANCE]) if IMPORTANCE in arrays else None
    adapter, metrics = train_adapter(
        institution, config, instruction, from_arrays(arrays[ARRAYS]), importance, state
    )
    return _trained(message, institution, instruction, adapter, metrics)


@app.evaluate()
@_says_problems
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global and the personalised adapter on held-out data; compute J if asked."""
    instruction, config, institution, state = _open(message, context)
    arrays = from_arrays(message.content.array_records[ARRAYS])
    if config.strategy == "fl-glm":
        records = message.content.array_records
        bodies = {m: from_arrays(records[key]) for m, key in BODY.items() if key in records}
        invitation = invitation_of(message)
        metrics = evaluate_split_models(
            institution,
            config,
            instruction,
            arrays,
            bodies,
            state,
            invitation,
            models_of(message),
        )
        importance = None
    else:
        metrics, importance = evaluate_models(institution, config, instruction, arrays, state)
    return answer(
        message,
        {"name": institution.name, "base": instruction.base},
        {SIZE: institution.size, **metrics},
        None if importance is None else to_arrays(importance),
    )


def _trained(
    message: Message,
    institution: Institution,
    instruction: Instruction,
    adapter: State,
    metrics: dict[str, int | float],
) -> Message:
    return answer(
        message,
        {"name": institution.name, "base": instruction.base},
        {SIZE: institution.size, **metrics},
        to_arrays(adapter),
    )


def _open(
    message: Message, context: Context
) -> tuple[Instruction, RunConfig, Institution, ClientState]:
    """Prepare for a train or evaluate message; another base model than the run's is refused."""
    started = time.monotonic()
    instruction = Instruction.of(message)
    config = parse_run_config(context.run_config)
    institution = open_institution(config, context.node_config)
    if digest(institution.fingerprint) != instruction.base:
        raise BaseModelError(
            f"the base model in {institution.directory} is not the run's: it has changed, or "
            "another one was put in its place"
        )
    state = ClientState(config.state_path, instruction.lineage, institution.name)
    seconds = time.monotonic() - started
    log(INFO, "%s is ready in %.1f s", institution.name, seconds)
    # Reading and tokenizing came out of the time that the client has.
    instruction = replace(instruction, time_limit=instruction.time_limit - seconds)
    return instruction, config, institution, state
