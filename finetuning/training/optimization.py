"""Optimizer, learning-rate schedule, and the optimizer's state as plain tensors."""

from collections.abc import Callable, Iterable, Mapping

import torch

from finetuning.settings import TrainSettings

OptimizerState = dict[str, torch.Tensor]
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def make_optimizer(
    parameters: Mapping[str, torch.nn.Parameter], settings: TrainSettings
) -> torch.optim.Optimizer:
    """Create Adam or AdamW for the adapter's weights."""
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    # A party of a split model may have no trainable weights, and Torch rejects an empty list.
    trained = list(parameters.values()) or [torch.nn.Parameter(torch.empty(0))]
    return kind(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def learning_rate(settings: TrainSettings, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0 over the whole run."""
    from transformers import get_scheduler

    # The library's scheduler can't jump to a step, so only its function of the step is used.
    throwaway = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        throwaway,
        num_warmup_steps=round(settings.warmup_ratio * total_steps),
        num_training_steps=total_steps,
    )
    factor = scheduler.lr_lambdas[0]
    return lambda step: settings.learning_rate * float(factor(step))


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the sum of squares over all gradients, with one synchronisation per device.

    Squares are computed in float64, because in float32 the square of 1.9e19 is infinite.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        by_device.setdefault(gradient.device, []).append(square)
    return float(sum(value for own in by_device.values() for value in torch.stack(own).tolist()))


def export_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> OptimizerState:
    """Copy Adam's moments and step counts, under the names ``<parameter>:<moment>``."""
    return {
        f"{name}:{moment}": optimizer.state[parameter][moment].detach().cpu().clone()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, torch.Tensor],
) -> None:
    """Restore moments and step counts; raise a ValueError if they are of a different adapter."""
    names = {key.rpartition(":")[0] for key in state}
    if state and names != set(parameters):
        raise ValueError("the optimizer's state belongs to a different adapter")
    for name in names:
        moments = {moment: state[f"{name}:{moment}"].clone() for moment in _MOMENTS}
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[moment] = moments[moment].to(parameters[name].device)
        optimizer.state[parameters[name]] = moments
