"""The client's interface to the body: send frames over a lane, and check the answers."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from finetuning.devices import to_device
from finetuning.randomness import normal
from split.lane.lane import Lane
from split.protocol.errors import LaneError, LaneTimeoutError
from split.protocol.frames import TENSOR_OF_KIND, Frame, Kind, Value
from split.protocol.training import RoundPlan

_OF_A_STEP = {Kind.HIDDEN, Kind.STEP, Kind.AVERAGE}


class RemoteBody:
    """The body of a model, computed by the block server at the other end of a lane.

    Methods that wait for the server raise ``LaneError`` if the lane has ended, no frame arrives in
    time, or a frame is unexpected or invalid. `SplitModel` describes the arguments.
    """

    def __init__(
        self, lane: Lane, frame_timeout: float, deadline: float | None, noise: float
    ) -> None:
        self._lane = lane
        self._frame_timeout = frame_timeout
        self._deadline = deadline
        self._noise = noise
        self._credits = 1
        self._step = 0
        self._average_every = 0
        self._until: float | None = 0.0  # time at which the round ends

    def join(
        self, plan: RoundPlan, max_batch_tokens: int, deadline: float | None, average_every: int
    ) -> None:
        """Begin a round of training; see `SplitModel.join`."""
        self._average_every, self._until = average_every, deadline
        self._lane.send(
            Kind.JOIN,
            fields={
                "steps": plan.steps,
                "first_step": plan.first_step,
                "total_steps": plan.total_steps,
                "longest": max_batch_tokens,
                "wants_gradient": plan.wants_gradient,
            },
        )
        # The server may first wait for at most split.join-timeout for other clients to join.
        self._credits = self._receive_credits(self._until)

    def choose(self, model: str) -> None:
        """Select, by name, one of the server's models to evaluate."""
        self._lane.send(Kind.JOIN, fields={"model": model})
        self._credits = self._receive_credits(None)

    @property
    def average_due(self) -> bool:
        """Whether the adapters must be averaged before the next step begins."""
        every = self._average_every
        return bool(every and self._step and self._step % every == 0)

    def average(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Send the head's and tail's adapters; return the average over all training clients."""
        self._lane.send(Kind.AVERAGE, self._step, tensors=adapters)
        average = self._receive(Kind.AVERAGE, self._until).tensors
        for name, own in adapters.items():
            tensor = average.get(name)
            if tensor is None or tensor.dtype is not torch.float32 or tensor.shape != own.shape:
                raise LaneError(f"the average has no float32 {name} of shape {tuple(own.shape)}")
        return average

    def pipeline(
        self, count: int, forward: Callable[[int], torch.Size], wants_gradient: bool = False
    ) -> Iterator[tuple[Kind, int, torch.Tensor]]:
        """Yield the answers to a step's micro-batches in order of arrival.

        At most as many micro-batches are in flight as the server has granted credits. ``forward``
        computes the head for the micro-batch with a given index, sends the output with
        ``send_hidden``, and returns its shape (rows, columns, hidden). If ``wants_gradient``, a
        ``GRADIENT`` frame is expected for each micro-batch, in response to ``send_gradient``.

        Yields:
            Tuples of the kind of frame, the index of the micro-batch, and a tensor of shape (rows,
            columns, hidden) on the CPU: the hidden states after the body (``HIDDEN``), or the
            gradient with respect to the hidden states before the body (``GRADIENT``).
        """
        last = Kind.GRADIENT if wants_gradient else Kind.HIDDEN
        shapes: list[torch.Size] = []  # shapes of the micro-batches that were sent
        due = {Kind.HIDDEN: 0, Kind.GRADIENT: 0}  # index of the next expected answer of each kind
        while due[last] < count:
            if len(shapes) < min(count, due[last] + self._credits):
                shapes.append(forward(len(shapes)))
                continue
            frame = self._receive(Kind.HIDDEN, also=last)
            kind, index = frame.kind, frame.micro_batch
            sent = len(shapes) if kind is Kind.HIDDEN else due[Kind.HIDDEN]
            if not due[kind] == index < sent:  # the answers of each kind must arrive in order
                raise LaneError(
                    f"received {kind.name} of micro-batch {index}; expected micro-batch "
                    f"{due[kind]} of the {sent} that were sent"
                )
            due[kind] += 1
            yield kind, index, _of_shape(frame, shapes[index])

    def send_hidden(
        self, index: int, hidden: torch.Tensor, lengths: torch.Tensor, fields: Mapping[str, Value]
    ) -> None:
        """Send hidden states after adding noise, if any. Only this method sends hidden states.

        ``hidden`` has shape (rows, columns, hidden). ``lengths`` contains the number of tokens in
        each row without padding, (rows,), and ``fields`` the fields of the frame (see
        ``docs/wire.md``).
        """
        hidden = hidden.detach()
        if self._noise:
            hidden = add_noise(hidden, self._noise)
        self._lane.send(
            Kind.HIDDEN,
            step=self._step,
            micro_batch=index,
            tensors={"hidden": hidden, "lengths": lengths},
            fields=fields,
        )

    def send_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Send the loss's gradient with respect to the body's output, (rows, columns, hidden)."""
        self._lane.send(
            Kind.GRADIENT, step=self._step, micro_batch=index, tensors={"gradient": gradient}
        )

    def end_step(self, squared_norm: float) -> tuple[float, float]:
        """End a step of training with the squared norm of the gradients of the head and the tail.

        Return the clipping factor (0 to 1), and the norm over all parties before clipping.
        """
        self._lane.send(Kind.STEP, self._step, fields={"squared_norm": squared_norm})
        # Other clients may be slow, so the answer may take until the end of the round.
        fields = self._receive(Kind.STEP, self._until).fields
        factor, norm = _number(fields, "factor", max_value=1.0), _number(fields, "norm")
        self._step += 1
        return factor, norm

    def exchange(
        self, index: int, hidden: torch.Tensor, lengths: torch.Tensor, fields: Mapping[str, Value]
    ) -> torch.Tensor:
        """Send hidden states; return the body's output on the CPU. The body caches keys and values.

        ``index`` is the number of exchanges so far for these texts. The other arguments are those
        of ``send_hidden``.
        """
        self.send_hidden(index, hidden, lengths, fields)
        # The first answer may have to wait until other clients' generations free activation budget.
        frame = self._receive(Kind.HIDDEN, None if index else self._deadline, micro_batch=index)
        return _of_shape(frame, hidden.shape)

    def end_exchanges(self) -> None:
        """Tell the server to free the cached keys and values of the current texts."""
        self._lane.send(Kind.STEP)

    def end(self, until: float | None = None) -> None:
        """End the round or the evaluation, wait for the server's confirmation, and close the lane.

        ``until`` is a time on ``time.monotonic``'s clock; None to wait for ``frame_timeout``.
        """
        self._lane.send(Kind.END)
        self._receive(Kind.END, until=until)
        self._lane.close()

    def _receive_credits(self, until: float | None) -> int:
        credits = self._receive(Kind.WELCOME, until).fields.get("credits")
        if not isinstance(credits, int) or isinstance(credits, bool) or credits < 1:
            raise LaneError(f"the server granted {credits!r} credits; expected at least 1")
        return min(credits, self._lane.limits.window)

    def _receive(
        self,
        kind: Kind,
        until: float | None = None,
        also: Kind | None = None,
        micro_batch: int | None = None,
    ) -> Frame:
        """Wait for a frame of the given kind, or of the kind ``also``, for the current step.

        Wait until the time ``until`` on ``time.monotonic``'s clock; None to wait for
        ``frame_timeout``. Check the index of the micro-batch unless ``micro_batch`` is None.
        """
        timeout = self._frame_timeout if until is None else max(0.0, until - time.monotonic())
        try:
            frame = self._lane.receive(timeout)
        except LaneTimeoutError:
            setting = "split.frame-timeout" if until is None else "round-timeout"
            raise LaneTimeoutError(
                f"the block server sent nothing for {timeout:.0f} s ({setting})"
            ) from None
        if frame.kind not in (kind, also):
            raise LaneError(f"the server sent {frame.kind.name}; expected {kind.name}")
        step = self._step if kind in _OF_A_STEP else 0
        if frame.step != step or (micro_batch is not None and frame.micro_batch != micro_batch):
            raise LaneError(
                f"the server sent {frame.kind.name} of step {frame.step}, micro-batch "
                f"{frame.micro_batch}, in step {step}"
            )
        return frame


def add_noise(hidden: torch.Tensor, noise: float) -> torch.Tensor:
    """Add Gaussian noise to hidden states of shape (rows, columns, hidden); see `connect`.

    ``noise`` is the standard deviation relative to the root mean square of each token's state.
    """
    deviation = noise * hidden.float().square().mean(-1, keepdim=True).sqrt()
    # Don't derive the noise from the run's seed, which the server knows too.
    drawn = normal(hidden.numel(), os.urandom).view_as(hidden).to(deviation.dtype)
    return hidden + (deviation * to_device(drawn, hidden.device)).to(hidden.dtype)


def _of_shape(frame: Frame, shape: torch.Size) -> torch.Tensor:
    tensor = frame.tensors[TENSOR_OF_KIND[frame.kind]]  # the lane has checked that it exists
    if tensor.shape != shape:
        raise LaneError(
            f"the server answered a tensor of shape {tuple(shape)} with a tensor of "
            f"shape {tuple(tensor.shape)}"
        )
    return tensor


def _number(fields: Mapping[str, Value], name: str, max_value: float = math.inf) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= max_value:
        raise LaneError(
            f"the server sent {name} = {value!r}; expected a number from 0 to {max_value:g}"
        )
    return float(value)
