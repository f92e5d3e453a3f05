"""Separate adapter weights for each row, so that autograd returns one gradient per row."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from finetuning.adapters.adapter import trainable_parameters
from finetuning.errors import BaseModelError


@contextmanager
def weights_per_row(peft_model: Any, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """Use a separate view of the adapter's weights for each row within the context.

    The views take no memory, but their gradients take as much memory as ``rows`` adapters. A hook
    can't replace prefixes, so the model itself must pass the views of prefixes to its blocks. All
    batches processed within the context must have exactly ``rows`` rows.

    Yield leaf tensors (rows, …), keyed by the parameters' names. Raise a BaseModelError if an
    adapted module is not a linear layer, isn't called within the context, or its input has no row
    dimension, as in an output head or in an expert of a mixture of experts.
    """
    copies: dict[str, torch.Tensor] = {}
    unused: set[str] = set()

    def by_row(path: str, weights: torch.Tensor, _: Any, inputs: Any, __: Any) -> Any:
        unused.discard(path)
        (hidden,) = inputs
        if hidden.ndim != 3 or len(hidden) != len(weights):
            raise _not_by_row(path)
        return hidden @ weights.mT

    with ExitStack() as hooks:
        for name, parameter in trainable_parameters(peft_model).items():
            copies[name] = parameter.detach().expand(rows, *parameter.shape).requires_grad_()
            path, _, kind = name.rpartition(".")
            module = peft_model.get_submodule(path)
            if isinstance(module, torch.nn.Linear) and kind == "weight" and module.bias is None:
                unused.add(path)
                hook = partial(by_row, path, copies[name])
                hooks.enter_context(module.register_forward_hook(hook))
            elif "prompt_encoder" not in name:
                raise _not_by_row(path)
        yield copies
    if unused:  # the model reads their weights without calling them
        raise _not_by_row(min(unused))


def _not_by_row(path: str) -> BaseModelError:
    return BaseModelError(
        f"differential privacy needs a gradient for each row, which can't be computed in {path}; "
        "adapt only linear layers of the attention (adapter.targets)"
    )
