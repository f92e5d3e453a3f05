"""The client side of FedJudge and FedProx: clients have the whole model and exchange adapters."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from logging import WARNING
from typing import Any

import torch
from flwr.common import log

from client_app.evaluation import EvaluationResult, save_final_adapters
from client_app.institution import Institution
from client_app.kept import keep_one
from client_app.release_check import check_release
from client_app.state import ClientState, PrivateRound
from client_app.task import ClientTask, Metrics, training_metrics
from client_app.unfinished_round import UnfinishedRound, private_round
from federation.messages import ARRAYS, IMPORTANCE
from federation.run_config import RunConfig
from finetuning.adapters.adapter import (
    State,
    attach_adapter,
    export_adapter,
    exported_names,
    load_adapter,
    trainable_parameters,
    training_only,
)
from finetuning.aggregation.robust_aggregation import distance
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.errors import DeadlineError
from finetuning.files import Stamps
from finetuning.model.base_model import load_base_model
from finetuning.model.interface import TrainableModel
from finetuning.randomness import derive_seed, secret_stream
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.training.continual import ContinualPenalty, importance, shuffle_importance
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.penalty import Penalty
from finetuning.training.private_gradients import Noise, PrivateGradients, poisson_steps
from finetuning.training.proximal import ProximalPenalty
from finetuning.whole_model import WholeModel

# Artificial rows of different lengths for a trial computation.
_TRIAL = [
    Example(torch.tensor(tokens), torch.tensor([False] + [True] * (len(tokens) - 1)), 1, "", 0)
    for tokens in ([3, 5, 7, 9], [3, 5])
]


def train(task: ClientTask) -> tuple[State, Metrics]:
    """Train from the global adapter for one round (FedJudge Algorithm 1, ClientUpdate).

    Return the local adapter, and the round's metrics.
    """
    with private_round(task) if task.site.privacy else nullcontext() as private:
        return _train(task, private)


def _train(task: ClientTask, private: PrivateRound | None) -> tuple[State, Metrics]:
    model, _ = _model_of(task)
    model.deadline = task.deadline
    load_adapter(model.peft_model, task.arrays[ARRAYS])
    trained = task.config.adapter.trained_names(task.arrays[ARRAYS], task.instruction.round)
    with training_only(model.peft_model, trained):
        adapter, metrics = _train_weights(task, private, model)
    return {name: adapter[name] for name in trained}, metrics


def _train_weights(
    task: ClientTask, private: PrivateRound | None, model: WholeModel
) -> tuple[State, Metrics]:
    """Train the weights that aren't frozen; return the whole local adapter and the metrics."""
    parameters = trainable_parameters(model.peft_model)
    penalty = _penalty(task, model, parameters)
    saved = task.saved_optimizer()
    own = {key: v for key, v in (saved or {}).items() if key.rpartition(":")[0] in parameters}
    unfinished = UnfinishedRound(task, private.id if private else "")
    stages: TrainableModel = model
    if private:
        local_round, stages = _privately(task, private, model, parameters)
    else:
        local_round = task.local_round()
    report, optimizer = train_round(
        model=stages,
        parameters=parameters,
        examples=task.institution.train,
        padding=task.institution.padding,
        local_round=local_round,
        settings=task.config.train,
        penalty=penalty,
        optimizer_state=own or None,
        description=task.title,
        checkpoint=unfinished,
    )
    adapter = export_adapter(model.peft_model)
    task.save(adapter, {**(saved or {}), **optimizer})
    metrics = training_metrics(report)
    metrics["distance"] = distance(adapter, task.arrays[ARRAYS])
    if penalty is not None:
        metrics["penalty"] = penalty.value()
        metrics["penalty-gradient-share"] = report.penalty_gradient_share or 0.0
    if isinstance(penalty, ContinualPenalty):
        weighted, count = penalty.distance(), sum(value.numel() for value in adapter.values())
        metrics["importance-distance"], metrics["lambda"] = weighted, penalty.weight
        metrics["mean-importance-distance"] = weighted / count
    if task.config.evaluate.alone and task.site.evaluates:
        _train_alone(task)
    unfinished.remove()
    return adapter, metrics


def _train_alone(task: ClientTask) -> None:
    """Train the model that learns from this client's rows alone, with the steps of the round.

    It starts from the run's first adapter, so there is none at a client that missed the first
    round. If this training fails, there is none, either; the round's result isn't lost.
    """
    number, state, config = task.instruction.round, _state_alone(task), task.config
    adapter = task.arrays[ARRAYS] if number == 1 else state.adapter(number - 1)
    if adapter is None:
        return
    settings = {
        "strategy": "fedjudge-base",
        "evaluate": config.evaluate.model_copy(update={"alone": False}),
    }
    try:
        train(
            replace(
                task,
                state=state,
                arrays={ARRAYS: adapter},
                instruction=replace(task.instruction, importance=False),
                config=config.model_copy(update=settings),
            )
        )
    except (DeadlineError, FloatingPointError, OSError) as error:
        log(WARNING, "%s: no model is trained alone any more: %s", task.institution.name, error)
        state.forget_from(0)


def _state_alone(task: ClientTask) -> ClientState:
    """Return the state of the model that this client trains alone."""
    name = f"{task.institution.name}/alone"
    return ClientState(task.config.state_path, task.instruction.lineage, name)


def evaluate(task: ClientTask) -> EvaluationResult:
    """Evaluate the base, global, personalised and alone-trained models as requested.

    If requested, compute the importance J at the global adapter.
    """
    instruction, adapter = task.instruction, task.arrays[ARRAYS]
    model, tokenizer = _model_of(task)
    model.deadline = task.deadline
    states = {"personalised": task.state}
    if task.config.evaluate.alone:
        states["alone"] = _state_alone(task)
    saved = {kind: state.adapter(instruction.round) for kind, state in states.items()}
    own = {kind: state for kind, state in saved.items() if state is not None}
    result = EvaluationResult()
    if instruction.losses:
        if instruction.round == 0:
            with model.without_adapter():
                result.measure(kind="base", model=model, tokenizer=tokenizer, task=task)
        else:
            for kind, state in own.items():
                load_adapter(model.peft_model, state)
                result.measure(kind=kind, model=model, tokenizer=tokenizer, task=task)
    load_adapter(model.peft_model, adapter)
    if instruction.losses and (instruction.round > 0 or task.config.initial_adapter):
        result.measure(kind="global", model=model, tokenizer=tokenizer, task=task)
    if instruction.final:
        peft_config = model.peft_model.peft_config["default"]
        save_final_adapters(task, {"global": adapter} | own, peft_config)
        result.release = check_release(task, model)
    if instruction.importance:
        next_round = instruction.round + 1
        names = task.config.adapter.trained_names(adapter, next_round)  # those that J protects
        with training_only(model.peft_model, names):
            result.importance = _importance(model, task.institution, task.config)
    return result


def _privately(
    task: ClientTask,
    private: PrivateRound,
    model: WholeModel,
    parameters: Mapping[str, torch.nn.Parameter],
) -> tuple[LocalRound, TrainableModel]:
    """Return the steps and stages of a differentially private round; record its ε if it is new.

    A row yields no example if ``data.max-length`` leaves no room for its output. Such rows are
    still sampled, with zero gradients: only the number of rows affects steps and sampling rates.
    """
    institution, number, terms = task.institution, task.instruction.round, task.site.privacy
    assert terms is not None
    # Fail before spending ε if the computation is impossible.
    task.steps(institution.size)
    model.row_gradients(collate(_TRIAL, institution.padding))
    spent = task.site.spend(task.config, institution, private.id)
    source = partial(secret_stream, bytes.fromhex(private.key))
    local_round = LocalRound(
        steps=poisson_steps(
            count=len(institution.train),
            rate=spent.sampling_rate,
            steps=spent.steps,
            random_bytes=source(derive_seed("rows")),
        ),
        first_step=(number - 1) * spent.steps,
        total_steps=task.config.rounds * spent.steps,
        seed=0,  # not secret: distinguishes the steps' noise, which is drawn with the key
        deadline=task.deadline,
    )
    noise = Noise(
        multiplier=spent.noise_multiplier,
        row_norm=terms.row_norm,
        expected_rows=spent.sampling_rate * institution.size,
    )
    return local_round, PrivateGradients(model, parameters, noise, source=source)


def _model_of(task: ClientTask) -> tuple[WholeModel, Any]:
    """Return the model, with an adapter, and the tokenizer; both are loaded once per process.

    The adapter still has the weights of the previous message: load new weights before use.
    """
    return _load_model(task.config.model, task.config.adapter, task.institution.model_files)


@keep_one
def _load_model(
    model: ModelSettings, adapter: AdapterSettings, _files: Stamps
) -> tuple[WholeModel, Any]:
    base = load_base_model(model)
    peft_model = attach_adapter(base.model, adapter, base.reference)
    return WholeModel(peft_model, adapter.prefix_dropout), base.tokenizer


def _importance(model: WholeModel, institution: Institution, config: RunConfig) -> State:
    """Compute J at the adapter's current weights, on training examples drawn with the run's seed.

    J is keyed by the adapter's exported names.
    """
    examples = institution.drawn(config.seed, config.continual.importance_examples)
    rows = [collate([example], institution.padding) for example in examples]
    values = importance(model, rows)
    names = exported_names(model.peft_model)
    return {names[name]: value.float().cpu() for name, value in values.items()}


def _penalty(
    task: ClientTask, model: WholeModel, parameters: Mapping[str, torch.nn.Parameter]
) -> Penalty | None:
    """Return the method's penalty on the distance from the global adapter, or None."""
    names = exported_names(model.peft_model)
    anchor = {name: task.arrays[ARRAYS][names[name]] for name in parameters}
    if task.config.method.penalty == "proximal":
        return ProximalPenalty(parameters, anchor, task.config.fedprox.mu)
    if task.config.method.penalty == "continual":
        return _continual(task, model, parameters, anchor)
    return None


def _continual(
    task: ClientTask,
    model: WholeModel,
    parameters: Mapping[str, torch.nn.Parameter],
    anchor: Mapping[str, torch.Tensor],
) -> Penalty | None:
    """Return the continual-learning penalty (Eq. 3 and 4); None in round 1, without J."""
    names = exported_names(model.peft_model)
    weights = task.arrays.get(IMPORTANCE)
    if task.instruction.importance:
        weights = _importance(model, task.institution, task.config)
    if weights is None:
        return None
    settings, number = task.config.continual, task.instruction.round
    if settings.shuffle:
        weights = shuffle_importance(weights, derive_seed("importance", task.config.seed, number))
    return ContinualPenalty(
        parameters,
        anchor=anchor,
        importance={name: weights[names[name]] for name in parameters},
        weight=settings.weight,
        share=settings.share,
        over=settings.sum,
    )
