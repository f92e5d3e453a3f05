"""Training, scoring and generation with a model whose blocks are all in one process."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.utils.integrations import map_cache_to_layer_device_map
from transformers import DynamicCache

from finetuning.adapters.adapter import trainable_parameters
from finetuning.adapters.prefixes import columns_of, prefix_cache, prefix_of_rows, shift_inputs
from finetuning.adapters.row_weights import weights_per_row
from finetuning.data.batching import MicroBatch
from finetuning.data.candidates import CandidateBatch
from finetuning.devices import mixed_precision
from finetuning.errors import DeadlineError
from finetuning.model.backbone_inputs import left_padding, without_cache
from finetuning.model.drafts import RowDrafts, drafting
from finetuning.model.output_head import (
    add_target_gradient,
    end_tokens,
    output_head,
    target_log_probabilities,
    target_loss,
)
from finetuning.randomness import derive_seed, set_seed


class WholeModel:
    """A model with all blocks in this process: base model and adapter, or the base model alone.

    In training, a prefix has dropout at the rate ``prefix_dropout``. After ``deadline``, a time on
    ``time.monotonic``'s clock, forward passes raise DeadlineError.
    """

    def __init__(self, peft_model: Any, prefix_dropout: float = 0.0) -> None:
        self.peft_model = peft_model
        self._prefix_dropout = prefix_dropout
        self.deadline = math.inf
        causal_lm = getattr(peft_model, "get_base_model", lambda: peft_model)()
        self._causal_lm, self._config, self._dtype = causal_lm, causal_lm.config, causal_lm.dtype
        self.end_tokens = end_tokens(causal_lm)
        self._backbone = causal_lm.base_model
        # Use a hook, because `generate` of transformers calls the backbone for each token.
        self._backbone.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._without_mask = False
        self._head = output_head(causal_lm)
        self._device = peft_model.device
        self._autocast = partial(mixed_precision, self._device, self._dtype)
        # LoRA is part of the blocks; a prefix must be passed to them.
        encoders = getattr(peft_model, "prompt_encoder", {})
        self._prefix = encoders["default"].embedding.weight if "default" in encoders else None

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before each row's tokens."""
        return 0 if self._prefix is None else self._prefix.shape[-2]

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Add the gradient of a step's loss, the mean over its targets, to the adapter's ``.grad``.

        Each micro-batch's dropout seed is derived from the seed of the step. Return each
        micro-batch's summed loss in nats.
        """
        targets = sum(len(batch.labels) for batch in batches)
        losses: list[torch.Tensor] = []
        with self._mode(training=True):
            for index, batch in enumerate(batches):
                set_seed(derive_seed("dropout", seed, index))
                losses.append(self._backward(batch, 1 / targets))
        return torch.stack(losses).tolist()

    def clip(self, maximum: float) -> float:
        """Scale gradients down to the maximum norm (0: no limit); return the original norm."""
        parameters = trainable_parameters(self.peft_model).values()
        return float(torch.nn.utils.clip_grad_norm_(parameters, maximum or float("inf")))

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss in nats, without dropout."""
        with self._mode(training=False):
            losses = [self._forward(batch) for batch in batches]
        return torch.stack(losses).tolist() if losses else []

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        new_tokens: int,
        row_drafts: RowDrafts | None = None,
        **settings: Any,
    ) -> torch.Tensor:
        """Continue each prompt by at most ``new_tokens`` tokens, without dropout.

        Prompts are (rows, columns), padded on the left; the mask is 0 for padding and 1 for tokens.
        Further settings are arguments of ``generate`` in ``transformers``; see `drafting` for
        ``row_drafts``. Return (rows, columns + new tokens) on the CPU; rows that end early are
        padded on the right.
        """
        # Omit a mask that hides no tokens, since transformers waits for the device to check it.
        self._without_mask = bool(mask.all())
        try:
            drafts = drafting(self._causal_lm, row_drafts)
            with self._mode(training=False), self._autocast(), drafts:
                result: torch.Tensor = self.peft_model.generate(
                    input_ids=tokens.to(self._device),
                    attention_mask=mask.to(self._device),
                    max_new_tokens=new_tokens,
                    **settings,
                )
        finally:
            self._without_mask = False
        return result.cpu()

    @torch.no_grad()
    def log_probabilities(
        self, batch: CandidateBatch, count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the `target_log_probabilities` of candidate answers without dropout."""
        with self._mode(training=False):
            with self._autocast():
                hidden = self._hidden_of_candidates(batch)
            chosen = hidden[batch.positions]
            return target_log_probabilities(self._head, chosen, batch.labels, count)

    def gradients_of(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return ∂L/∂W of a micro-batch's mean loss, without dropout, for every adapter weight."""
        parameters = trainable_parameters(self.peft_model)
        with self._mode(training=False), self._recomputing_blocks():
            loss = self._forward(batch) / len(batch.labels)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True))

    def row_gradients(self, batch: MicroBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Compute the gradient of each row's loss (the mean over its targets) without dropout.

        Return (rows, …) ∂Lᵢ/∂W for every adapter weight, and the summed loss of all targets in
        nats. Raise a BaseModelError if an adapted module's input has no row dimension.
        """
        rows, columns = batch.tokens.shape
        row_of = batch.positions // columns
        scale = 1 / row_of.bincount(minlength=rows)[row_of]
        with (
            self._mode(training=False),
            self._recomputing_blocks(),
            weights_per_row(self.peft_model, rows) as weights,
            self._using(None if self._prefix is None else next(iter(weights.values()))),
        ):
            loss = self._backward(batch, scale)
        gradients = {
            n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()
        }
        return gradients, loss

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Disable the adapter within the context."""
        with self._using(None), self.peft_model.disable_adapter():
            yield

    @contextmanager
    def _using(self, prefix: torch.Tensor | None) -> Iterator[None]:
        before, self._prefix = self._prefix, prefix
        try:
            yield
        finally:
            self._prefix = before

    def _forward(self, batch: MicroBatch) -> torch.Tensor:
        batch = batch.to(self._device)
        with self._autocast():
            return target_loss(self._head, self._hidden(batch), batch)

    def _backward(self, batch: MicroBatch, scale: float | torch.Tensor) -> torch.Tensor:
        batch = batch.to(self._device)
        with self._autocast():
            return add_target_gradient(
                head=self._head, hidden=self._hidden(batch), batch=batch, scale=scale
            )

    def _hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return (rows, columns, hidden) after the last block and norm.

        Padding follows a row's tokens, so causal attention never reads padding, and padding
        predicts no target. Therefore no mask is needed, and attention can skip everything above the
        diagonal. With a prefix, the position of the first token is the prefix's length.
        """
        inputs = without_cache(self._backbone)
        if self._prefix is not None:
            inputs["past_key_values"] = self._empty_cache(len(batch.tokens))
        output = self._backbone(input_ids=batch.tokens, **inputs)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _hidden_of_candidates(self, batch: CandidateBatch) -> torch.Tensor:
        """Return (positions, hidden) of all beginnings, then of all endings.

        Each ending is processed with the keys and values of its beginning.
        """
        before, each = self.columns_before, batch.endings_each
        lengths = batch.beginning_lengths.to(self._device)
        inputs = left_padding(self._backbone, lengths, batch.beginnings.shape[1])
        inputs = shift_inputs(inputs, before)
        cache = self._empty_cache(len(lengths))

        def compute(tokens: torch.Tensor) -> torch.Tensor:
            output = self._backbone(
                input_ids=tokens.to(self._device), past_key_values=cache, use_cache=True, **inputs
            )
            return output.last_hidden_state.flatten(0, 1)  # type: ignore[no-any-return]

        hidden = compute(batch.beginnings)
        if not each:
            return hidden
        cache.reorder_cache(torch.arange(len(lengths)).repeat_interleave(each))
        columns = batch.endings.shape[1]
        mask = inputs["attention_mask"].repeat_interleave(each, 0)
        inputs["attention_mask"] = torch.nn.functional.pad(mask, (0, columns), value=1)
        if "position_ids" in inputs:
            start = (before + lengths).repeat_interleave(each)[:, None]
            inputs["position_ids"] = start + torch.arange(columns, device=self._device)
        return torch.cat([hidden, compute(batch.endings)])

    def _empty_cache(self, rows: int) -> Any:
        """Return a key-value cache that contains only the prefix, if any."""
        if self._prefix is None:
            return DynamicCache(config=self._config)
        rate = self._prefix_dropout * self.peft_model.training
        prefix = prefix_of_rows(self._prefix, rows, self._dtype, rate)
        blocks = dict(enumerate(torch.split(prefix, columns_of(self._config), dim=-1)))
        cache = prefix_cache(blocks, self.columns_before, self._config)
        map_cache_to_layer_device_map(self._causal_lm, cache)
        return cache

    def _before_forward(self, _: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
        """Check the deadline, and remove a mask that masks nothing."""
        if time.monotonic() > self.deadline:
            raise DeadlineError("the time limit expired; raise round-timeout, or request less work")
        return args, arguments | {"attention_mask": None} if self._without_mask else arguments

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
        """Recompute activations in evaluation mode too if gradient checkpointing is enabled.

        Blocks recompute only in training mode. Therefore the blocks themselves, but not their
        submodules, are set to training mode, and dropout that blocks apply directly is disabled.
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
