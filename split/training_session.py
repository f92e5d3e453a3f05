"""One client's round of training at the block server: what it may send when."""

import math
from dataclasses import dataclass
from typing import Protocol

from finetuning.randomness import derive_seed
from split.branch import Branch, Graph, State
from split.compute import ComputeThread, Urgency
from split.frames import Frame, Kind
from split.lane import Lane
from split.session import ProtocolError, Session, hidden_of, whole_number


class Schedule(Protocol):
    """How clients share the body; see ``split.schedules``."""

    def enter(self, client: str, steps: int) -> Branch:
        """Let a client begin its round."""
        ...

    def leave(self, client: str) -> None:
        """Let a client go."""
        ...

    def average(self, client: str, step: int, own: State) -> State:
        """Average all parties' adapters within a round."""
        ...


@dataclass(frozen=True)
class Terms:
    """What the lanes of a round have in common.

    Attributes:
        window: micro-batches of a lane that may be under way at once.
        activation_budget: padded tokens whose activations may exist at once.
        lanes: how many lanes share them.

    """

    window: int
    activation_budget: int
    lanes: int

    def credits(self, longest: int) -> int:
        """Give how many micro-batches of a lane may be under way, by the longest one's tokens.

        Raises:
            ProtocolError: not even one fits.

        """
        if longest > self.activation_budget:
            raise ProtocolError(
                f"a micro-batch of {longest} padded tokens is larger than split.activation-budget "
                f"= {self.activation_budget}; raise that, or lower train.batch-size or "
                "data.max-length"
            )
        return max(1, min(self.window, self.activation_budget // (self.lanes * max(1, longest))))


class TrainingSession(Session):
    """Serves one client's round of training.

    Args:
        lane: to the client; the handshake is over.
        seed: of the client's training in this round.
        schedule: decides what it trains.
        compute: runs its jobs.
        terms: of the round.
        frame_timeout: seconds to wait for the client's next frame.

    """

    def __init__(
        self,
        lane: Lane,
        seed: int,
        schedule: Schedule,
        compute: ComputeThread,
        terms: Terms,
        frame_timeout: float,
    ) -> None:
        super().__init__(lane, "train", compute, frame_timeout)
        self._seed = seed
        self._schedule = schedule
        self._terms = terms
        self._graphs: dict[int, tuple[Graph, int]] = {}
        self._held = 0  # padded tokens whose activations exist, or would if a job hadn't failed
        # Micro-batches of the present step whose hidden states, and whose gradients have come.
        self._step = self._received = self._returned = 0

    def serve(self) -> None:
        """Answer frames until the client ends its round.

        Raises:
            LaneError: the lane broke, or the client was silent for too long.
            ProtocolError: the client sent what it may not send now.
            RuntimeError: the schedule doesn't let it in.

        """
        join = self.receive()
        if join.kind is not Kind.JOIN:
            raise ProtocolError(f"a lane began with a frame {join.kind.name}")
        self._first = whole_number(join, "first_step")
        self._total = whole_number(join, "total_steps")
        self._longest = whole_number(join, "longest")
        self._wants_gradient = bool(join.fields.get("wants_gradient"))
        self._credits = self._terms.credits(self._longest)
        client = self.lane.identity.node
        self._branch = self._schedule.enter(client, whole_number(join, "steps"))
        try:
            self.lane.send(Kind.WELCOME, fields={"credits": self._credits})
            while (frame := self.receive()).kind is not Kind.END:
                self._take(frame)
            self.lane.send(Kind.END)
        finally:
            self.compute.withdraw(self)
            self.compute.call(self._clean)
            self._schedule.leave(client)

    def _take(self, frame: Frame) -> None:
        if frame.step != self._step:
            raise ProtocolError(f"step {frame.step} came in step {self._step}")
        if frame.kind is Kind.HIDDEN:
            self._take_hidden(frame)
        elif frame.kind is Kind.GRADIENT:
            self._take_gradient(frame)
        elif frame.kind is Kind.STEP:
            self._take_step(frame)
        elif frame.kind is Kind.AVERAGE:
            if self._received:
                raise ProtocolError("an average was asked for within a step")
            # The answer to the last step went out before its optimizer had done its work.
            self.compute.call(lambda: None)
            average = self._schedule.average(
                self.lane.identity.node, frame.step, dict(frame.tensors)
            )
            self.lane.send(Kind.AVERAGE, frame.step, tensors=average)
        else:
            raise ProtocolError(f"a frame {frame.kind.name} came in a round of training")

    def _take_hidden(self, frame: Frame) -> None:
        index = frame.micro_batch
        if index != self._received:
            raise ProtocolError(f"micro-batch {index} came in the place of {self._received}")
        if self._received - self._returned >= self._credits:
            raise ProtocolError(f"more than {self._credits} micro-batches are under way")
        hidden, padding = hidden_of(frame)
        tokens = hidden.shape[0] * hidden.shape[1]
        if tokens > self._longest:
            raise ProtocolError(f"{tokens} padded tokens came; {self._longest} were agreed")
        self._received += 1
        seed = derive_seed("dropout", derive_seed(self._seed, frame.step), index, "body")

        def forward() -> None:
            self._held += tokens
            graph = self._branch.forward(hidden, padding, seed, self._wants_gradient)
            self._graphs[index] = (graph, tokens)
            self.account.tokens += tokens
            self.lane.send(Kind.HIDDEN, frame.step, index, {"hidden": graph.output.detach()})

        self.put(Urgency.FORWARD, forward, tokens)

    def _take_gradient(self, frame: Frame) -> None:
        index = frame.micro_batch
        # Hidden states that this answers were sent, so that their job is done.
        if index != self._returned or index not in self._graphs:
            raise ProtocolError(f"the gradient of micro-batch {index} came in the wrong place")
        self._returned += 1

        def backward() -> None:
            graph, tokens = self._graphs.pop(index)
            self._release(tokens)
            gradient = frame.tensors["gradient"]
            if gradient.shape != graph.output.shape:
                raise ProtocolError(f"a gradient of shape {tuple(gradient.shape)} came")
            result = self._branch.backward(graph, gradient)
            if result is not None:
                self.lane.send(Kind.GRADIENT, frame.step, index, {"gradient": result})

        self.put(Urgency.BACKWARD, backward)

    def _take_step(self, frame: Frame) -> None:
        squared_norm = frame.fields.get("squared_norm")
        if not isinstance(squared_norm, float) or not 0 <= squared_norm < math.inf:
            raise ProtocolError(f"a step ended with squared_norm = {squared_norm!r}")
        if self._returned != self._received or not self._received:
            raise ProtocolError("a step ended before all its gradients came")
        self._step += 1
        self._received = self._returned = 0

        def step() -> None:
            factor, norm = self._branch.clip(squared_norm)
            # The client has its answer before the optimizer's work begins.
            self.lane.send(Kind.STEP, frame.step, fields={"factor": factor, "norm": norm})
            self._branch.step(self._first + frame.step, self._total)
            self.account.steps += 1

        self.put(Urgency.STEP, step)

    def _clean(self) -> None:
        """Leave nothing of an unfinished step."""
        self._graphs.clear()
        self._release(self._held)
        self._branch.forget_gradients()

    def _release(self, tokens: int) -> None:
        self._held -= tokens
        self.compute.release(tokens)
