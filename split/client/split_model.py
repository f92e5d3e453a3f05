"""A model whose middle blocks are at a server (FL-GLM sections 3.1 and 3.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from finetuning.adapters.adapter import load_state
from finetuning.data.batching import MicroBatch
from finetuning.data.candidates import CandidateBatch
from finetuning.devices import to_device
from finetuning.model.output_head import (
    add_target_gradient,
    end_tokens,
    target_log_probabilities,
    target_loss,
)
from finetuning.randomness import derive_seed, drawing_from
from finetuning.training.optimization import squared_norm
from split.client.remote_body import RemoteBody
from split.lane.lane import Lane
from split.model.generation import generate, hidden_of_candidates
from split.model.part import Part, propagate
from split.protocol.frames import Kind, Padding
from split.protocol.training import RoundPlan


class SplitModel:
    """A model with its head and tail in this process, and its body at the other end of a lane.

    The caller that opened the lane must close it. The model waits ``frame_timeout`` seconds for the
    server's next frame, and for activation budget until ``deadline`` on ``time.monotonic``'s clock
    (None: ``frame_timeout``). `connect` describes ``noise``.

    Example:
        The client of the example of `BlockServer` takes a step with two texts of six tokens.

        >>> import time
        >>> import split
        >>> import torch
        >>> from finetuning.data.batching import collate
        >>> from finetuning.data.tokenization import Example
        >>> partition = split.partition_of(directory, settings)
        >>> parts = split.load_parts(model, directory, partition, ["head", "tail"])
        >>> for part in parts.values():
        ...     part.attach(adapter)
        >>> text = Example(torch.arange(6), torch.arange(6) > 2, 3, reference="", row=0)
        >>> with split.connect(invitation, parts, settings, 64, time.monotonic() + 60) as client:
        ...     client.join(split.RoundPlan(steps=1, first_step=0, total_steps=1, seed=0))
        ...     losses = client.accumulate([collate([text, text], padding=0)], seed=0)
        ...     norm = client.clip(maximum=1.0)
        ...     client.end()
        >>> losses[0] > 0 and norm > 0
        True
    """

    def __init__(
        self,
        head: Part,
        tail: Part,
        lane: Lane,
        frame_timeout: float,
        deadline: float | None = None,
        noise: float = 0.0,
    ) -> None:
        self._head = head
        self._tail = tail
        self._output_head = tail.output_head
        self.lane = lane
        self._deadline = deadline
        self.body = RemoteBody(lane, frame_timeout, deadline, noise)
        self.end = self.body.end

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The weights that the client trains, keyed by name in the whole model."""
        return self._head.trainable() | self._tail.trainable()

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before the tokens of each row."""
        return self._head.columns_before

    @property
    def end_tokens(self) -> list[int]:
        """End-of-text tokens of the checkpoint."""
        return end_tokens(self._tail.model)

    def join(
        self,
        plan: RoundPlan,
        max_batch_tokens: int | None = None,
        deadline: float | None = None,
        average_every: int = 0,
    ) -> None:
        """Begin a round of training, which ends at ``deadline`` on ``time.monotonic``'s clock.

        The plan's numbers of steps are sent to the server, but not its seed. The largest
        micro-batch has ``max_batch_tokens`` padded tokens, prefixes included; by default, as many
        as the lane allows. The default deadline is the lane's. All parties' adapters are averaged
        after every ``average_every`` steps; 0 means never.
        """
        plan = replace(plan, wants_gradient=bool(self._head.trainable()))
        if max_batch_tokens is None:
            max_batch_tokens = self.lane.limits.max_tokens
        until = self._deadline if deadline is None else deadline
        self.body.join(plan, max_batch_tokens, until, average_every)

    def choose(self, model: str, adapters: Mapping[str, torch.Tensor] | None) -> None:
        """Select, by name, one of the server's models to evaluate.

        ``adapters`` contains the head's and tail's adapter weights; None for a model without any.
        """
        for part in (self._head, self._tail):
            part.use(None if adapters is None else "default")
        if adapters is not None:
            load_state(self.parameters, adapters)
        self.body.choose(model)

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Accumulate the gradient of a step's loss in ``.grad`` of all three parties.

        Micro-batches are independent, so several can be in flight: at most as many as the server
        has granted credits. Each party adds up the gradients in the order of the micro-batches, and
        derives the seed of each micro-batch's dropout from the step's seed. Return the summed loss
        of each micro-batch in nats.
        """
        if self.body.average_due:
            own = {name: parameter.detach() for name, parameter in self.parameters.items()}
            load_state(self.parameters, self.body.average(own))
        self._set_up(training=True)
        batches = [batch.to(self._head.device) for batch in batches]
        targets = sum(len(batch.labels) for batch in batches)
        wants_gradient = bool(self._head.trainable())
        outputs: dict[int, torch.Tensor] = {}  # outputs of the head that await their gradients
        losses = []

        def forward(index: int) -> torch.Size:
            counts = {
                "targets": len(batches[index].labels),
                "step_targets": targets,
                "micro_batches": len(batches),
            }
            with drawing_from(derive_seed("dropout", seed, index, "head")):
                output = self._forward_head(index, batches[index], counts)
            if wants_gradient:
                outputs[index] = output
            return output.shape

        for kind, index, received in self.body.pipeline(len(batches), forward, wants_gradient):
            if kind is Kind.HIDDEN:
                with drawing_from(derive_seed("dropout", seed, index, "tail")):
                    loss, gradient = self._backward_tail(received, batches[index], 1 / targets)
                losses.append(loss)
                self.body.send_gradient(index, gradient)
            else:
                propagate(outputs.pop(index), received)
        return torch.stack(losses).tolist()

    @torch.no_grad()
    def clip(self, maximum: float) -> float:
        """End the step, and clip the gradients with the factor that the server returns.

        ``maximum`` is the maximum norm over all parties, as at the server; 0 disables clipping.
        Return the norm over all parties before clipping.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        factor, norm = self.body.end_step(squared_norm(gradients))
        if maximum:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return the summed loss of each micro-batch in nats, computed without dropout."""
        self._set_up(training=False)
        losses = []

        def forward(index: int) -> torch.Size:
            return self._forward_head(index, batches[index], {}).shape

        for _, index, received in self.body.pipeline(len(batches), forward):
            hidden = self._tail(received, _padding(batches[index]))
            with self._tail.autocast():
                losses.append(target_loss(self._output_head, hidden, batches[index]))
        return torch.stack(losses).tolist() if losses else []

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Generate continuations of prompts; see ``WholeModel.generate``."""
        self._set_up(training=False)
        output: torch.Tensor = generate(
            head=self._head,
            tail=self._tail,
            exchange=self.body.exchange,
            tokens=tokens,
            mask=mask,
            new_tokens=new_tokens,
            **settings,
        )
        self.body.end_exchanges()
        return output.cpu()

    @torch.no_grad()
    def log_probabilities(
        self, batch: CandidateBatch, count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute log probabilities of candidate answers; see ``WholeModel.log_probabilities``."""
        self._set_up(training=False)
        hidden = hidden_of_candidates(
            head=self._head, tail=self._tail, batch=batch, exchange=self.body.exchange
        )
        self.body.end_exchanges()
        chosen = hidden[batch.positions]
        return target_log_probabilities(self._output_head, chosen, batch.labels, count)

    def _set_up(self, training: bool) -> None:
        for part in (self._head, self._tail):
            part.train(training)

    def _forward_head(
        self, index: int, batch: MicroBatch, counts: Mapping[str, int]
    ) -> torch.Tensor:
        """Compute the head's output, send it to the body, and return it."""
        output = self._head(batch.tokens, _padding(batch))
        self.body.send_hidden(index, output, batch.lengths, {"side": "right", **counts})
        return output

    def _backward_tail(
        self, received: torch.Tensor, batch: MicroBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradient of ``scale`` times a micro-batch's summed loss to ``.grad`` of the tail.

        Return the summed loss in nats, and the scaled gradient with respect to ``received``, the
        hidden states after the body: (rows, columns, hidden).
        """
        middle = to_device(received, self._tail.device).requires_grad_()
        hidden = self._tail(middle, _padding(batch))
        with self._tail.autocast():
            loss = add_target_gradient(
                head=self._output_head, hidden=hidden, batch=batch, scale=scale
            )
        gradient = middle.grad
        assert gradient is not None  # every micro-batch has targets
        return loss, gradient


def _padding(batch: MicroBatch) -> Padding:
    return Padding("right", batch.lengths)
