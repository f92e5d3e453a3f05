"""A lane's seat at the body: what becomes of a client's frames that the protocol lets pass."""

from dataclasses import dataclass
from typing import Protocol

import torch

from finetuning.randomness import derive_seed
from split.model.part import Padding
from split.protocol.frames import Kind
from split.server.branch import Branch, Graph
from split.server.compute import Urgency
from split.server.round_plan import RoundPlan
from split.server.session import Session


@dataclass(frozen=True)
class Hidden:
    """A micro-batch after the head.

    Attributes:
        step: of the round, counted from 0.
        index: of the micro-batch in the step.
        states: (rows, columns, hidden).
        padding: of the rows.
        columns_before: places that a prefix takes before each row's tokens.
        targets: how many tokens the client predicts in it.
        step_targets: and in the whole step.
        micro_batches: how many the client's step has.

    """

    step: int
    index: int
    states: torch.Tensor
    padding: Padding
    columns_before: int
    targets: int
    step_targets: int
    micro_batches: int

    @property
    def tokens(self) -> int:
        """Padded tokens."""
        return self.states.shape[0] * self.states.shape[1]

    @property
    def places(self) -> int:
        """Padded tokens and the prefix's places: what it takes of the activation budget."""
        return self.tokens + self.states.shape[0] * self.columns_before


class Seat(Protocol):
    """Where a lane's micro-batches are computed: alone, or in a stack with others'.

    The methods are called from the lane's thread in the order of its frames, which the session has
    checked; answers go out over the lane.
    """

    def forward(self, hidden: Hidden) -> None:
        """Compute a micro-batch, and answer with its hidden states."""
        ...

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Take a micro-batch's gradient, and answer with that of its hidden states."""
        ...

    def step(self, step: int, squared_norm: float) -> None:
        """End a step: answer with factor and norm, and let the body's optimizer work."""
        ...

    def waits(self) -> bool:
        """Say whether it is not the client's turn to send something."""
        ...

    def leave(self) -> None:
        """Leave nothing of an unfinished step."""
        ...


class Alone:
    """A seat at a branch that no other lane uses at the same time.

    Args:
        session: whose lane.
        branch: the body's adapters that it trains.
        plan: the client's round.

    """

    def __init__(self, session: Session, branch: Branch, plan: RoundPlan) -> None:
        self._session = session
        self._branch = branch
        self._plan = plan
        self._graphs: dict[int, tuple[Graph, int]] = {}
        self._held = 0  # places whose activations exist, or would if a job hadn't failed

    def forward(self, hidden: Hidden) -> None:
        """Compute a micro-batch as soon as the activation budget allows."""
        seed = derive_seed(
            "dropout", derive_seed(self._plan.seed, hidden.step), hidden.index, "body"
        )

        def forward() -> None:
            self._held += hidden.places
            graph = self._branch.forward(
                hidden.states, hidden.padding, seed, self._plan.wants_gradient
            )
            self._graphs[hidden.index] = (graph, hidden.places)
            self._session.account.tokens += hidden.tokens
            self._session.answer(hidden.step, hidden.index, graph.output)

        self._session.put(Urgency.FORWARD, forward, hidden.places)

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Compute a micro-batch's backward pass, which frees its activations."""

        def backward() -> None:
            graph, places = self._graphs.pop(index)
            self._release(places)
            result = self._branch.backward(graph, gradient)
            if result is not None:
                self._session.lane.send(Kind.GRADIENT, step, index, {"gradient": result})

        self._session.put(Urgency.BACKWARD, backward)

    def step(self, step: int, squared_norm: float) -> None:
        """Clip over the client's parts and the body, and take the body's step."""

        def take_step() -> None:
            factor, norm = self._branch.clip(squared_norm)
            # The client has its answer before the optimizer's work begins.
            self._session.lane.send(Kind.STEP, step, fields={"factor": factor, "norm": norm})
            self._branch.step(self._plan.first_step + step, self._plan.total_steps)
            self._session.account.steps += 1

        self._session.put(Urgency.STEP, take_step)

    def waits(self) -> bool:
        """Say that it is: the session knows of the jobs that wait."""
        return False

    def leave(self) -> None:
        """Drop the activations and gradients of a step that was not finished."""
        self._session.compute.withdraw(self._session)
        self._session.compute.call(self._clean)

    def _clean(self) -> None:
        self._graphs.clear()
        self._release(self._held)
        self._branch.forget_gradients()

    def _release(self, places: int) -> None:
        self._held -= places
        self._session.compute.release(places)
