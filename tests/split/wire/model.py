"""A split model on the client that was implemented from docs/wire.md."""

from collections.abc import Mapping, Sequence

import torch

from finetuning.adapters.adapter import load_state
from finetuning.data.batching import MicroBatch
from finetuning.data.candidates import CandidateBatch
from finetuning.model.output_head import add_target_gradient, target_loss
from finetuning.randomness import derive_seed, drawing_from
from finetuning.training.optimization import squared_norm
from split.model.key_values import KeyValues
from split.model.part import Padding, Part
from tests.split.wire.lane import Lane
from tests.split.wire.records import Frame, Kind

FRAME_SECONDS = 60.0


class WireModel:
    """A split model that sends frames as docs/wire.md describes, but uses our parts and losses."""

    columns_before = 0

    def __init__(self, head: Part, tail: Part, lane: Lane, average_every: int = 0) -> None:
        self._head, self._tail, self.lane = head, tail, lane
        self._average_every = average_every
        self._step = 0

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._head.trainable() | self._tail.trainable()

    def join(self, steps: int, total_steps: int, longest: int) -> None:
        """Begin a round of training."""
        self.lane.send(
            Kind.JOIN,
            fields={
                "steps": steps,
                "first_step": 0,
                "total_steps": total_steps,
                "longest": longest,
                "wants_gradient": bool(self._head.trainable()),
            },
        )
        self._credits = int(self._receive(Kind.WELCOME).fields["credits"])

    def choose(self, model: str, adapters: Mapping[str, torch.Tensor] | None) -> None:
        """Choose the model to evaluate."""
        for part in (self._head, self._tail):
            part.use(None if adapters is None else "default")
        if adapters is not None:
            load_state(self.parameters, adapters)
        self.lane.send(Kind.JOIN, fields={"model": model})
        self._credits = int(self._receive(Kind.WELCOME).fields["credits"])

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Run a step's forward and backward passes, with as many in flight as there are credits."""
        if self._average_every and self._step and self._step % self._average_every == 0:
            own = {name: parameter.detach() for name, parameter in self.parameters.items()}
            self.lane.send(Kind.AVERAGE, self._step, tensors=own)
            load_state(self.parameters, self._receive(Kind.AVERAGE).tensors)
        self._head.train(True)
        self._tail.train(True)
        targets = sum(len(batch.labels) for batch in batches)
        outputs: list[torch.Tensor] = []
        losses: list[float] = []
        ended = 0
        wants_gradient = bool(self._head.trainable())
        while len(losses) < len(batches) or (wants_gradient and ended < len(batches)):
            if len(outputs) < len(batches) and len(outputs) - len(losses) < self._credits:
                index, batch = len(outputs), batches[len(outputs)]
                with drawing_from(derive_seed("dropout", seed, index, "head")):
                    outputs.append(self._head(batch.tokens, Padding("right", batch.lengths)))
                counts = {
                    "targets": len(batch.labels),
                    "step_targets": targets,
                    "micro_batches": len(batches),
                }
                self._send_hidden(index, outputs[-1], batch.lengths, {"side": "right", **counts})
                continue
            frame = self._receive(Kind.HIDDEN, Kind.GRADIENT)
            if frame.kind is Kind.GRADIENT:
                assert frame.micro_batch == ended
                outputs[ended].backward(frame.tensors["gradient"].to(outputs[ended]))
                ended += 1
                continue
            index = frame.micro_batch
            assert index == len(losses)
            middle = frame.tensors["hidden"].requires_grad_()
            with drawing_from(derive_seed("dropout", seed, index, "tail")):
                hidden = self._tail(middle, Padding("right", batches[index].lengths))
                loss = add_target_gradient(
                    self._tail.output_head, hidden, batches[index], 1 / targets
                )
            losses.append(float(loss))
            self.lane.send(Kind.GRADIENT, self._step, index, {"gradient": middle.grad})
        return losses

    @torch.no_grad()
    def clip(self, maximum: float) -> float:
        """End a step; the server answers with the norm over all parties and the clipping factor."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        fields = {"squared_norm": squared_norm(gradients)}
        self.lane.send(Kind.STEP, self._step, fields=fields)
        fields = self._receive(Kind.STEP).fields
        for gradient in gradients:
            gradient.mul_(fields["factor"])
        self._step += 1
        return float(fields["norm"])

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss."""
        self._head.train(False)
        self._tail.train(False)
        begun, losses = 0, []
        while len(losses) < len(batches):
            if begun < len(batches) and begun - len(losses) < self._credits:
                batch = batches[begun]
                hidden = self._head(batch.tokens, Padding("right", batch.lengths))
                self._send_hidden(begun, hidden, batch.lengths, {"side": "right"})
                begun += 1
                continue
            frame = self._receive(Kind.HIDDEN)
            assert frame.micro_batch == len(losses)
            batch = batches[len(losses)]
            hidden = self._tail(frame.tensors["hidden"], Padding("right", batch.lengths))
            losses.append(float(target_loss(self._tail.output_head, hidden, batch)))
        return losses

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, drafted: int = 0
    ) -> torch.Tensor:
        """Continue prompts greedily, all by ``new_tokens`` tokens.

        Each frame after the prompts also has ``drafted`` guesses, which the next one drops.
        """
        self._head.train(False)
        self._tail.train(False)
        columns, lengths = tokens.shape[1], mask.sum(dim=1)
        left = Padding("left", lengths)
        head, tail = KeyValues(self._head, left, columns), KeyValues(self._tail, left, columns)
        given = tokens
        for index in range(new_tokens):
            guesses, drop = drafted * (index > 0), drafted * (index > 1)
            fields = {"side": "left"} | ({"drop": drop} if drop else {})
            fields |= {} if index else {"new_tokens": new_tokens + drafted}
            given = torch.cat([given, given[:, -1:].expand(-1, guesses)], dim=1)
            self._send_hidden(index, head.extend(given, drop), lengths, fields)
            frame = self._receive(Kind.HIDDEN)
            assert frame.micro_batch == index
            hidden = tail.extend(frame.tensors["hidden"], drop)
            last = hidden[:, hidden.shape[1] - guesses - 1 :][:, :1]
            logits = self._tail.output_head(inputs_embeds=last, use_cache=False).logits
            given = logits.argmax(dim=-1).cpu()
            tokens = torch.cat([tokens, given], dim=1)
            lengths = torch.full_like(lengths, 1 + drafted)
        self.lane.send(Kind.STEP)
        return tokens

    @torch.no_grad()
    def log_probabilities(self, batch: CandidateBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute each beginning once, and then its endings."""
        (rows, columns), more = batch.beginnings.shape, batch.endings.shape[1]
        each = len(batch.endings) // rows
        left = Padding("left", batch.beginning_lengths)
        head, tail = KeyValues(self._head, left, columns), KeyValues(self._tail, left, columns)
        room = each * (columns + more) - columns if each else 1
        fields = {"side": "left", "new_tokens": room}
        self._send_hidden(0, head.extend(batch.beginnings), batch.beginning_lengths, fields)
        computed = [tail.extend(self._receive(Kind.HIDDEN).tensors["hidden"]).flatten(0, 1)]
        if each:
            head.repeat(each)
            tail.repeat(each)
            fields = {"side": "right", "endings": each}
            self._send_hidden(1, head.extend(batch.endings), batch.ending_lengths, fields)
            computed.append(tail.extend(self._receive(Kind.HIDDEN).tensors["hidden"]).flatten(0, 1))
        self.lane.send(Kind.STEP)
        chosen = torch.cat(computed)[batch.positions]
        logits = self._tail.output_head(inputs_embeds=chosen[None], use_cache=False).logits[0]
        found = logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
        return found, logits.argmax(-1) == batch.labels

    def end(self) -> None:
        """End the round, or the evaluation."""
        self.lane.send(Kind.END)
        self._receive(Kind.END)
        self.lane.close()

    def _send_hidden(self, index: int, hidden, lengths, fields) -> None:
        tensors = {"hidden": hidden, "lengths": lengths}
        self.lane.send(Kind.HIDDEN, self._step, index, tensors, fields)

    def _receive(self, *kinds: Kind) -> Frame:
        frame = self.lane.receive(FRAME_SECONDS)
        of_a_step = (Kind.HIDDEN, Kind.GRADIENT, Kind.STEP, Kind.AVERAGE)
        assert frame.kind in kinds, frame
        assert frame.step == (self._step if frame.kind in of_a_step else 0)
        return frame
