"""Adapter weights of each row's own, so that autograd returns one gradient for each row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetuning.adapters.adapter import trainable_parameters
from finetuning.model.base_model import BaseModelError


@contextmanager
def weights_per_row(peft_model: Any, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Compute with copies of the adapter's weights, one for each row, within the block.

    The copies take no memory, but their gradients take that of ``rows`` adapters. Prefixes aren't
    modules: the model has to pass their copies to its blocks.

    Args:
        peft_model: Model with an adapter.
        rows: Rows of the batches that are computed within the block.

    Yields:
        (rows, …) leaf tensors by the parameters' names.

    Raises:
        BaseModelError: Adapted modules don't get their inputs row by row, such as an output head or
            a mixture's experts.

    """
    copies: dict[str, torch.Tensor] = {}
    handles: list[Any] = []
    for name, parameter in trainable_parameters(peft_model).items():
        copies[name] = parameter.detach().expand(rows, *parameter.shape).requires_grad_()
        path, _, kind = name.rpartition(".")
        module = peft_model.get_submodule(path)
        if isinstance(module, torch.nn.Linear) and kind == "weight" and module.bias is None:
            handles.append(module.register_forward_hook(_by_row(path, copies[name])))
        elif "prompt_encoder" not in name:
            raise _not_by_row(path)
    try:
        yield copies
    finally:
        for handle in handles:
            handle.remove()


def _by_row(path: str, weights: torch.Tensor) -> Any:
    """Return a hook that replaces a module's output by that with each row's own weights."""

    def compute(_: Any, inputs: tuple[torch.Tensor], __: torch.Tensor) -> torch.Tensor:
        (hidden,) = inputs
        if hidden.ndim != 3 or len(hidden) != len(weights):
            raise _not_by_row(path)
        return hidden @ weights.mT

    return compute


def _not_by_row(path: str) -> BaseModelError:
    return BaseModelError(
        f"the gradients of single rows, which differential privacy needs, can't be told apart in "
        f"{path}; adapt linear layers of the attention alone (adapter.targets)"
    )
