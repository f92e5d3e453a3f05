"""The stages of a training step if one process holds every block of the model."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from finetuning.adapters.adapter import trainable_parameters
from finetuning.adapters.prefixes import columns_of, prefix_cache
from finetuning.data.batching import MicroBatch
from finetuning.randomness import derive_seed, set_seed

# A micro-batch's logits can be larger than everything else in memory. This many targets at once
# keep a CPU or GPU busy, and take 32 MiB for a vocabulary of 32,000 tokens.
_TARGETS_AT_ONCE = 256


class _Backbone(torch.nn.Module):
    """Replaces a model's blocks by a function that returns hidden states and a cache."""

    def __init__(self, compute: Callable[[Any, Any], tuple[torch.Tensor, Any]]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, input_ids: Any = None, *_: None, inputs_embeds: Any = None, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        hidden, cache = self._compute(input_ids, inputs_embeds)
        output = MoeModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        output.cross_attentions = None  # GPT-2 reads them.
        return output

    @property
    def decoder(self) -> "_Backbone":
        """OPT's name for its blocks."""
        return self


def output_head(
    causal_lm: Any,
    compute: Callable[[Any, Any], tuple[torch.Tensor, Any]] = lambda _, embeds: (embeds, None),
) -> Any:
    """Return the checkpoint's own model class without everything before the output head.

    With (1, targets, hidden) as ``inputs_embeds`` it returns their logits, with the architecture's
    scaling and capping. Its modules are the model's own, not copies.

    Args:
        causal_lm: The model, or a party's part of it.
        compute: Replaces the blocks: returns hidden states and a cache for ``input_ids`` and
            ``inputs_embeds``.

    """
    head = copy.copy(causal_lm)
    head._modules = dict(causal_lm._modules)
    setattr(head, causal_lm.base_model_prefix, _Backbone(compute))
    return head


def target_loss(head: Any, hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Sum the cross-entropy over a micro-batch's targets (FedJudge Eq. 1).

    Args:
        head: See `output_head`.
        hidden: (rows, columns, hidden) after the last block and norm.
        batch: Positions and labels of the targets.

    Returns:
        A float32 scalar, in nats.

    """
    parts = zip(*_targets(hidden, batch), strict=True)
    return torch.stack([_part_loss(head, chosen, labels) for chosen, labels in parts]).sum()


def add_target_gradient(
    head: Any, hidden: torch.Tensor, batch: MicroBatch, scale: float
) -> torch.Tensor:
    """Compute `target_loss`, and add the gradient of ``scale`` times it to every ``.grad``.

    The output head runs forward and backward in parts, so that only one part's logits exist.

    Returns:
        The loss without the scale, detached.

    """
    gradients, losses = [], []
    parts, labels = _targets(hidden, batch)
    for part, label in zip(parts, labels, strict=True):
        chosen = part.detach().requires_grad_()
        loss = _part_loss(head, chosen, label)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        gradients.append(chosen.grad)
        losses.append(loss.detach())
    if hidden.requires_grad:
        torch.autograd.backward(parts, gradients)
    return torch.stack(losses).sum()


def _targets(
    hidden: torch.Tensor, batch: MicroBatch
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return, in parts, the hidden states that predict targets, and the targets."""
    chosen = hidden.flatten(0, 1).index_select(0, batch.positions.to(hidden.device))
    labels = batch.labels.to(hidden.device)
    return torch.split(chosen, _TARGETS_AT_ONCE), torch.split(labels, _TARGETS_AT_ONCE)


def _part_loss(head: Any, chosen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = head(inputs_embeds=chosen[None], use_cache=False).logits[0]
    return cross_entropy(logits.float(), labels, reduction="sum")


class WholeModel:
    """A model with all stages in this process.

    Args:
        peft_model: Base model with its adapter, or alone if nothing is trained.

    """

    def __init__(self, peft_model: Any) -> None:
        self.peft_model = peft_model
        causal_lm = getattr(peft_model, "get_base_model", lambda: peft_model)()
        self._config, self._dtype = causal_lm.config, causal_lm.dtype
        self._backbone = causal_lm.base_model
        self._head = output_head(causal_lm)
        self._device = peft_model.device
        # LoRA is part of the blocks; a prefix has to be passed to them.
        encoders = getattr(peft_model, "prompt_encoder", {})
        self._prefix = encoders["default"].embedding.weight if "default" in encoders else None
        self._mixed_precision = self._device.type == "cuda" and causal_lm.dtype == torch.bfloat16

    @property
    def columns_before(self) -> int:
        """Prefix positions before each row's tokens."""
        return 0 if self._prefix is None else len(self._prefix)

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Add the gradient of a step's loss to the adapter's ``.grad``.

        The loss of a step is the mean over its targets: each micro-batch counts by its share.

        Args:
            batches: Micro-batches of the step.
            seed: Seed of the step; each micro-batch derives the seed of its dropout from it.

        Returns:
            Each micro-batch's summed loss in nats.

        """
        targets = sum(len(batch.labels) for batch in batches)
        losses = []
        with self._mode(training=True):
            for index, batch in enumerate(batches):
                set_seed(derive_seed("dropout", seed, index))
                with self._autocast():
                    hidden = self._hidden(batch)
                    losses.append(add_target_gradient(self._head, hidden, batch, 1 / targets))
        return [float(loss) for loss in losses]

    def clip(self, maximum: float) -> float:
        """Scale the adapter's gradients down to the maximum norm, unless it is 0.

        Returns:
            The norm before clipping.

        """
        parameters = trainable_parameters(self.peft_model).values()
        return float(torch.nn.utils.clip_grad_norm_(parameters, maximum or float("inf")))

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss in nats, without dropout."""
        with self._mode(training=False):
            return [float(self._forward(batch)) for batch in batches]

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Continue prompts, without dropout.

        Args:
            tokens: (rows, columns) of prompts, padded on the left.
            mask: (rows, columns), 0 for padding and 1 for the prompts.
            new_tokens: Maximal number of tokens to generate per row.
            settings: Further arguments of ``generate`` in ``transformers``.

        Returns:
            (rows, columns and new tokens); rows that end early are padded on the right.

        """
        with self._mode(training=False):
            result: torch.Tensor = self.peft_model.generate(
                input_ids=tokens.to(self._device),
                attention_mask=mask.to(self._device),
                max_new_tokens=new_tokens,
                **settings,
            )
        return result

    def gradients_of(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return ∂L/∂W of a micro-batch's mean loss, without dropout, for every adapter weight."""
        parameters = trainable_parameters(self.peft_model)
        with self._mode(training=False), self._recomputing_blocks():
            loss = self._forward(batch) / len(batch.labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Disable the adapter within the block."""
        prefix, self._prefix = self._prefix, None
        try:
            with self.peft_model.disable_adapter():
                yield
        finally:
            self._prefix = prefix

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        with self._autocast():
            return target_loss(self._head, self._hidden(batch), batch)

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return (rows, columns, hidden) after the last block and norm.

        Padding follows a row's tokens, where causal attention does not look, and predicts nothing.
        Therefore no mask is needed, and attention can skip everything above the diagonal. With
        prefixes the tokens' positions are counted from the prefixes' end.
        """
        inputs = {"input_ids": batch.tokens.to(self._device)}
        if self._prefix is not None:
            blocks = dict(enumerate(self._prefix.split(columns_of(self._config), dim=1)))
            inputs["past_key_values"] = prefix_cache(
                blocks, len(self._prefix), self._config, len(batch.tokens), self._dtype
            )
        output = self._backbone(**inputs, use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self._mixed_precision else nullcontext()

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self.peft_model.training
        self.peft_model.train(training)
        try:
            yield
        finally:
            self.peft_model.train(before)

    @contextmanager
    def _recomputing_blocks(self) -> Iterator[None]:
        """Recompute activations in evaluation mode, if gradient checkpointing is enabled.

        Blocks do so in training mode only. This sets the block itself to training mode and not its
        submodules, and disables the dropout of blocks that apply it themselves (OPT's).
        """
        blocks = [
            m for m in self.peft_model.modules() if getattr(m, "gradient_checkpointing", False)
        ]
        rates = [(b, b.dropout) for b in blocks if isinstance(getattr(b, "dropout", None), float)]
        for block in blocks:
            block.training = True
        for block, _ in rates:
            block.dropout = 0.0
        try:
            yield
        finally:
            for block in blocks:
                block.training = False
            for block, rate in rates:
                block.dropout = rate
