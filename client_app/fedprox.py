"""The client side of FedProx: like FedJudge, with the proximal term as the penalty."""

from collections.abc import Mapping

import torch

from client_app.fedjudge import base_model, evaluate, global_weights, train_adapter
from client_app.task import Metrics, Task
from federation.run_config import RunConfig
from federation.site_policy import SitePolicy
from finetuning.adapters.adapter import State
from finetuning.model.whole_model import WholeModel
from finetuning.training.proximal import ProximalPenalty

__all__ = ["base_model", "check", "computes_importance", "evaluate", "train"]


def check(_policy: SitePolicy, _config: RunConfig) -> None:
    """Do nothing: checks for adapters are made for every strategy."""


def computes_importance(_config: RunConfig, _kind: str) -> bool:
    """Return False: FedProx doesn't use J."""
    return False


def train(task: Task) -> tuple[State, Metrics]:
    """Train from the global adapter for one round, with the proximal term in every step.

    Returns:
        The local adapter, and the round's metrics.

    """
    adapter, metrics, _ = train_adapter(task, _penalty)
    return adapter, metrics


def _penalty(
    task: Task, model: WholeModel, parameters: Mapping[str, torch.nn.Parameter]
) -> ProximalPenalty:
    anchor = global_weights(task, model, parameters)
    return ProximalPenalty(parameters, anchor, task.config.fedprox.mu)
