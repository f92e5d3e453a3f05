"""The output head: the loss and its gradient, computed in chunks of targets.

In the functions' arguments, ``head`` is the model that `output_head` returns, and ``hidden`` are
the (rows, columns, hidden) states after the last block and norm.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

from finetuning.data.batching import MicroBatch
from finetuning.devices import to_device

# A micro-batch's logits can be larger than all other tensors together, so they are computed in
# chunks. Chunks of these sizes in float32 keep a CPU or an accelerator busy.
_CPU_LOGIT_BYTES, _LOGIT_BYTES = 32 * 2**20, 256 * 2**20
_WEIGHT_BYTES = 16 * 2**20  # size of the parts in which a matrix is converted to float32


class _Backbone(torch.nn.Module):
    """A module that replaces a model's blocks with a function."""

    def __init__(
        self, compute: Callable[[Any, Any, Any], tuple[torch.Tensor, Any]], replaced: Any
    ) -> None:
        super().__init__()
        self._compute = compute
        self._replaced = [replaced]  # in a list, so that its modules don't become this one's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # some heads read multipliers of the blocks (Falcon-H1)
            return getattr(vars(self)["_replaced"][0], name)

    def forward(
        self,
        input_ids: Any = None,
        *_: None,
        inputs_embeds: Any = None,
        past_key_values: Any = None,
        **__: Any,
    ) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        hidden, cache = self._compute(input_ids, inputs_embeds, past_key_values)
        output = MoeModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        output.cross_attentions = output.shared_kv_states = None  # GPT-2 and Gemma 4 read these.
        return output

    @property
    def decoder(self) -> "_Backbone":
        """The attribute in which OPT stores its blocks."""
        return self


class _Float32Products(TorchFunctionMode):
    """Compute products with matrices in float32, without a float32 copy of a whole matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear or args[1].dtype == torch.float32:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = (*args, None)[:3]
        inputs = inputs.float()  # some heads have converted it to the matrix's type
        product = inputs.new_empty(*inputs.shape[:-1], len(weight))
        rows = max(1, _WEIGHT_BYTES // (4 * weight.shape[1]))
        for part, matrix in zip(product.split(rows, -1), weight.split(rows), strict=True):
            part.copy_(inputs @ matrix.float().T)
        return product if bias is None else product + bias.float()


def output_head(
    causal_lm: Any,
    compute: Callable[[Any, Any, Any], tuple[torch.Tensor, Any]] = lambda _, *states: states,
) -> Any:
    """Return a model of the checkpoint's class that has only the output head.

    For (1, targets, hidden) as ``inputs_embeds``, the returned model computes logits, including the
    architecture's scaling and capping. It shares its modules with ``causal_lm``, which is a model
    or a party's part of one. ``compute`` replaces the blocks, and returns hidden states and a cache
    for ``input_ids``, ``inputs_embeds`` and ``past_key_values``.
    """
    head = copy.copy(causal_lm)
    # If the blocks are on several devices, accelerate's ``forward`` is bound to ``causal_lm``.
    vars(head).pop("forward", None)
    head._modules = dict(causal_lm._modules)
    setattr(head, causal_lm.base_model_prefix, _Backbone(compute, causal_lm.base_model))
    return head


def end_tokens(causal_lm: Any) -> list[int]:
    """Return the end-of-text tokens of a checkpoint or of a party's part of it."""
    ends = causal_lm.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def target_loss(head: Any, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum the cross-entropy over a micro-batch's targets (FedJudge Eq. 1), in nats and float32."""
    parts = zip(*_targets(head, hidden, batch), strict=True)
    return torch.stack([_losses(head, chosen, labels).sum() for chosen, labels in parts]).sum()


def add_target_gradient(
    head: Any, hidden: torch.Tensor, batch: MicroBatch, scale: float | torch.Tensor
) -> torch.Tensor:
    """Compute `target_loss`, and add the gradient of ``scale`` times the loss to every ``.grad``.

    The output head runs forward and backward in chunks, so only one chunk's logits exist at a time.
    ``scale`` is a factor for the loss, or (targets,) factors for the targets' losses. The returned
    loss is detached and not scaled.
    """
    gradients, losses = [], []
    parts, labels = _targets(head, hidden, batch)
    if isinstance(scale, float):
        scale = hidden.new_full(batch.labels.shape, scale, dtype=torch.float32)
    scale = to_device(scale, hidden.device, torch.float32)
    weights = torch.split(scale, _targets_at_once(head, hidden.device))
    for part, label, weight in zip(parts, labels, weights, strict=True):
        chosen = part.detach().requires_grad_()
        loss = _losses(head, chosen, label)
        loss.backward(weight)  # type: ignore[no-untyped-call]
        gradients.append(chosen.grad)
        losses.append(loss.detach().sum())
    if hidden.requires_grad:
        torch.autograd.backward(parts, gradients)
    return torch.stack(losses).sum()


def target_log_probabilities(
    head: Any, chosen: torch.Tensor, labels: torch.Tensor, count: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each target's log-probability, and the likeliest tokens in its place.

    Logits are always computed in float32. In bfloat16, values between 16 and 32 have steps of 1/8,
    so many candidate answers would be equally likely. ``chosen`` are the (targets, hidden)
    states after the last block and norm that predict the (targets,) labels. The results are
    (targets,) log-probabilities in nats, and (targets, count) tokens with (targets, count)
    log-probabilities.
    """
    chunks = []
    # Convert norms, biases and scales here; `_Float32Products` converts the matrices.
    vectors = (each for each in head.named_parameters() if each[1].ndim < 2)
    weights = {name: p.float() for name, p in vectors if p.is_floating_point()}
    size = _targets_at_once(head, chosen.device)
    parts = torch.split(labels.to(chosen.device), size)
    for part, label in zip(torch.split(chosen.float(), size), parts, strict=True):
        inputs = {"inputs_embeds": part[None], "use_cache": False}
        with torch.autocast(chosen.device.type, enabled=False), _Float32Products():
            logits = functional_call(head, weights, kwargs=inputs).logits[0]
        values = logits.log_softmax(-1)
        best = values.topk(min(count, values.shape[-1]))
        chunks.append((values.gather(1, label[:, None])[:, 0], best.indices, best.values))
    values, tokens, best_values = (torch.cat(each) for each in zip(*chunks, strict=True))
    return values, tokens, best_values


def _targets(
    head: Any, hidden: torch.Tensor, batch: MicroBatch
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return chunks of the hidden states that predict targets, and chunks of the targets."""
    batch = batch.to(hidden.device)
    chosen = hidden.flatten(0, 1).index_select(0, batch.positions)
    size = _targets_at_once(head, hidden.device)
    return torch.split(chosen, size), torch.split(batch.labels, size)


def _targets_at_once(head: Any, device: torch.device) -> int:
    """Return the number of targets in a chunk."""
    size = _CPU_LOGIT_BYTES if device.type == "cpu" else _LOGIT_BYTES
    return max(1, size // (4 * int(head.config.get_text_config().vocab_size)))


def _losses(head: Any, chosen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = head(inputs_embeds=chosen[None], use_cache=False).logits[0]
    return cross_entropy(logits.float(), labels, reduction="none")
