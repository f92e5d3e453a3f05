"""A client's round: from the global adapter to its own (FedJudge Algorithm 1, ClientUpdate)."""

import time
from logging import WARNING

import torch
from flwr.common.logger import log

from client_app.institution import Institution, load_model
from client_app.state import ClientState
from finetuning.adapters.adapter import (
    State,
    export_adapter,
    exported_names,
    load_adapter,
    trainable_parameters,
)
from finetuning.data.batching import MicroBatch, collate, micro_batches, plan_round, steps_per_round
from finetuning.data.tokenization import Example
from finetuning.model.whole_model import WholeModel
from finetuning.randomness import derive_seed
from finetuning.training.continual import Penalty, importance
from finetuning.training.loop import Round, TrainingReport, train_round
from finetuning.training.optimization import OptimizerState
from strategies.messages import Instruction
from strategies.run_config import RunConfig


def train_adapter(
    institution: Institution,
    config: RunConfig,
    instruction: Instruction,
    arrays: State,
    server_importance: State | None,
    state: ClientState,
) -> tuple[State, dict[str, int | float]]:
    """Train for one round.

    Args:
        institution: whose data.
        config: the run's.
        instruction: round, time limit, and whether to use one's own J.
        arrays: the global adapter Ŵ.
        server_importance: J from the server, if it sent one.
        state: where the local adapter and the optimizer are kept.

    Returns:
        The local adapter, and the round's metrics.

    """
    deadline = time.monotonic() + instruction.time_limit
    model, _ = load_model(config.model, config.adapter)
    load_adapter(model.peft_model, arrays)
    parameters = trainable_parameters(model.peft_model)
    names = exported_names(model.peft_model)
    weights = server_importance
    if instruction.importance:
        weights = own_importance(institution, config, model, institution.padding)
    penalty = None
    if weights is not None:
        penalty = Penalty(
            parameters,
            anchor={name: arrays[names[name]] for name in parameters},
            importance={name: weights[names[name]] for name in parameters},
            weight=config.continual.weight,
        )
    report, optimizer = train_round(
        model,
        parameters,
        institution.train,
        institution.padding,
        place_of(institution, config, instruction, deadline),
        config.train,
        penalty,
        optimizer_to_go_on_with(institution, config, instruction, state),
        description=f"{institution.name}, round {instruction.round}",
    )
    adapter = export_adapter(model.peft_model)
    keeps = config.train.optimizer_state == "keep"
    state.save(instruction.round, adapter, optimizer if keeps else {})
    metrics = training_metrics(report)
    if report.final_distance is not None:
        s = report.final_distance
        metrics |= {
            "importance-distance": s,
            "mean-importance-distance": s / sum(p.numel() for p in parameters.values()),
            "penalty": config.continual.weight * (s + s * s),
            "penalty-gradient-share": report.penalty_gradient_share or 0.0,
        }
    return adapter, metrics


def place_of(
    institution: Institution, config: RunConfig, instruction: Instruction, deadline: float
) -> Round:
    """Say which examples a client's round trains on, in which order, and until when."""
    lengths = [len(example.tokens) for example in institution.train]
    per_round = steps_per_round(len(lengths), config.train)
    return Round(
        steps=plan_round(
            lengths,
            config.train,
            instruction.round,
            derive_seed("order", config.seed, institution.name),
        ),
        first_step=(instruction.round - 1) * per_round,
        total_steps=config.rounds * per_round,
        seed=derive_seed("train", config.seed, institution.name, instruction.round),
        deadline=deadline,
    )


def optimizer_to_go_on_with(
    institution: Institution, config: RunConfig, instruction: Instruction, state: ClientState
) -> OptimizerState | None:
    """Give the optimizer of the round before, if it is to be kept; forget what comes after."""
    state.forget_from(instruction.round)
    if config.train.optimizer_state != "keep":
        return None
    optimizer = state.optimizer(instruction.round - 1)
    if instruction.round > 1 and not optimizer:
        log(WARNING, "%s has no optimizer to go on with, and starts anew", institution.name)
    return optimizer


def own_importance(
    institution: Institution, config: RunConfig, model: WholeModel, padding: int
) -> State:
    """Compute J at the adapter's present weights, on training examples drawn by the run's seed.

    Returns:
        J under the adapter's exported names.

    """
    generator = torch.Generator().manual_seed(
        derive_seed("importance", config.seed, institution.name)
    )
    order = torch.randperm(len(institution.train), generator=generator)
    examples = [institution.train[i] for i in order[: config.continual.importance_examples]]
    values = importance(
        model, _batches(examples, config, model.columns_before, padding), config.continual.jacobian
    )
    names = exported_names(model.peft_model)
    return {names[name]: value.float().cpu() for name, value in values.items()}


def _batches(
    examples: list[Example], config: RunConfig, columns_before: int, padding: int
) -> list[MicroBatch]:
    columns = [columns_before + len(example.tokens) for example in examples]
    budget = config.train.batch_size * max(columns)
    return [
        collate([examples[i] for i in group], padding)
        for group in micro_batches(range(len(examples)), columns, budget)
    ]


def training_metrics(report: TrainingReport) -> dict[str, int | float]:
    """Give what a round of training reports to the server, penalty aside."""
    return {
        "loss": sum(report.losses) / len(report.losses),
        "loss-first": report.losses[0],
        "loss-last": report.losses[-1],
        "steps": len(report.losses),
        "tokens": report.tokens,
        "target-tokens": report.target_tokens,
        "seconds": report.seconds,
        "gradient-norm": report.gradient_norm,
        "learning-rate": report.learning_rate,
    }
