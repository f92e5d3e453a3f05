"""Lanes whose micro-batches are computed together (FL-GLM section 3.3, client-batch).

Micro-batch j of all members is padded, stacked and run once, and all members' steps end in one step
of the body's optimizer. With w_i the share of client i in the targets of all, the body's gradient
is Σ w_i·g_i, and each head and tail gets its own client's gradient. A member that leaves doesn't
stop the others: its micro-batches that are finished count, those that aren't don't, and the shares
are those of what counts.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from finetuning.randomness import derive_seed
from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from split.server.branch import Branch
from split.server.compute import ComputeThread, Job, Urgency
from split.server.round_plan import RoundPlan
from split.server.seat import Hidden
from split.server.session import Session
from split.server.stacked import Member, Stacked


class Stack:
    """What the lanes of a round compute together.

    Args:
        branch: the body's adapters.
        compute: runs its jobs.
        seed: of the body's dropout in this round.
        activation_budget: padded tokens whose activations may exist at once.
        gather_timeout: seconds after which members that others wait for are left behind.

    """

    def __init__(
        self,
        branch: Branch,
        compute: ComputeThread,
        seed: int,
        activation_budget: int,
        gather_timeout: float,
    ) -> None:
        self._branch = branch
        self._compute = compute
        self._seed = seed
        self._budget = activation_budget
        self._gather_timeout = gather_timeout
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        self._stacks: dict[int, Stacked] = {}  # whose gradients haven't all come
        self._next = 0  # micro-batch to be stacked next
        self._step = 0
        self._pending = 0  # jobs that are queued or running
        self._progress = time.monotonic()
        # Of the compute thread alone: targets whose gradients are in the body's, and places
        # whose activations exist.
        self._counted = 0
        self._held = 0

    def add(self, session: Session, plan: RoundPlan) -> Member:
        """Take a client in, before the first step."""
        with self._lock:
            member = Member(session, plan)
            self._members[member.client] = member
            # The body's learning rate is that of the client whose run is longest.
            by_length = sorted(self._members.values(), key=lambda m: (m.plan.total_steps, m.client))
            self._rate = by_length[-1].plan
            return member

    def forward(self, member: Member, hidden: Hidden) -> None:
        """Take a micro-batch after the head."""
        with self._lock:
            member.micro_batches = hidden.micro_batches
            member.hidden[hidden.index] = hidden
            self._go_on()

    def backward(self, member: Member, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a micro-batch's output, of the mean loss over the client's step."""
        with self._lock:
            member.gradients[index] = gradient
            self._go_on()

    def step(self, member: Member, squared_norm: float) -> None:
        """Take the end of a member's step."""
        with self._lock:
            member.squared_norm = squared_norm
            self._go_on()

    def remove(self, member: Member) -> None:
        """Let a member go; the others go on without it."""
        with self._lock:
            del self._members[member.client]
            self._go_on()
        self._compute.call(self._clean)

    def waits(self, member: Member) -> bool:
        """Say whether it is not the member's turn to send something."""
        with self._lock:
            sent = member.hidden or member.gradients or member.squared_norm is not None
            return bool(sent or self._pending)

    def leave_stragglers_behind(self) -> None:
        """End the lanes of members that others have waited for, for too long."""
        with self._lock:
            idle = time.monotonic() - self._progress
            if self._pending or idle < self._gather_timeout:
                return
            for member in self._missing():
                member.session.give_up(
                    f"others waited {idle:.0f} s for {member.client} "
                    f"(split.gather-timeout = {self._gather_timeout:g})"
                )

    def failed(self, error: BaseException) -> None:
        """End all lanes: a job for all of them raised."""
        with self._lock:
            self._pending -= 1
            for member in self._members.values():
                member.session.give_up(f"{type(error).__name__}: {error}")

    def _go_on(self) -> None:
        """Queue whatever all who are needed for it have come to."""
        self._progress = time.monotonic()
        members = self._in_order()
        while needed := [member for member in members if member.needs(self._next)]:
            if any(self._next not in member.hidden for member in needed):
                break
            self._stack(Stacked({member: member.hidden.pop(self._next) for member in needed}))
        for index, stacked in list(self._stacks.items()):
            present = self._present(stacked)
            if not all(index in member.gradients for member in present):
                break  # the sum of all gradients is rounded by the order in which they come
            gradients = {member: member.gradients.pop(index) for member in present}
            del self._stacks[index]
            self._put(Urgency.BACKWARD, self._backward_job(index, stacked, gradients))
        if members and all(member.squared_norm is not None for member in members):
            squared_norms = sum(member.squared_norm or 0.0 for member in members)
            for member in members:
                member.squared_norm = None
            self._put(Urgency.STEP, lambda: self._take_step(squared_norms))

    def _missing(self) -> list[Member]:
        """Give those without whom others can't go on, at the first place where that is so."""
        for index, stacked in self._stacks.items():
            present = self._present(stacked)
            if behind := _behind(present, [index in member.gradients for member in present]):
                return behind
        members = self._in_order()
        if behind := _behind(members, [member.squared_norm is not None for member in members]):
            return behind
        needed = [member for member in members if member.needs(self._next)]
        return _behind(needed, [self._next in member.hidden for member in needed])

    def _in_order(self) -> list[Member]:
        return [self._members[client] for client in sorted(self._members)]

    def _present(self, stacked: Stacked) -> list[Member]:
        return [m for m in stacked.parts if self._members.get(m.client) is m]

    def _put(self, urgency: Urgency, work: Callable[[], None], tokens: int = 0) -> None:
        def run() -> None:
            work()
            with self._lock:
                self._pending -= 1
                self._progress = time.monotonic()

        self._pending += 1
        self._compute.put(Job(self, urgency, run, tokens))

    def _stack(self, stacked: Stacked) -> None:
        """Queue the forward pass of the next micro-batch."""
        index, step = self._next, self._step
        self._stacks[index] = stacked
        self._next += 1
        # Padding can make a stack larger than its members agreed on; by itself it may always run.
        places = min(stacked.places, self._budget)
        seed = derive_seed("dropout", derive_seed(self._seed, step), index, "body")
        queued = time.perf_counter()

        def forward() -> None:
            started = time.perf_counter()
            self._held += places
            states, padding = stacked.states()
            wanted = any(member.plan.wants_gradient for member in stacked.parts)
            stacked.graph = self._branch.forward(states, padding, seed, wanted)
            self._account(stacked, time.perf_counter() - started)
            for member, hidden, rows in stacked.rows_of(stacked.graph.output):
                member.session.account.tokens += hidden.tokens
                member.session.account.seconds_queued += started - queued
                with suppress(LaneError):  # a lane that has ended is not the others' affair
                    member.session.answer(step, index, rows)

        self._put(Urgency.FORWARD, forward, places)

    def _backward_job(
        self, index: int, stacked: Stacked, gradients: Mapping[Member, torch.Tensor]
    ) -> Callable[[], None]:
        """Make the backward pass of a stack; members that have left give no gradient to it."""
        step = self._step

        def backward() -> None:
            started = time.perf_counter()
            graph, stacked.graph = stacked.graph, None
            places = min(stacked.places, self._budget)
            self._held -= places
            self._compute.release(places)
            if graph is None or not gradients:
                return
            together = stacked.gradient(gradients, graph.output)
            result = self._branch.backward(graph, together)
            self._counted += sum(stacked.parts[member].targets for member in gradients)
            self._account(stacked, time.perf_counter() - started)
            if result is None:
                return
            for member, hidden, rows in stacked.rows_of(result):
                if member in gradients and member.plan.wants_gradient:
                    # Back from the sum to the mean over the client's own step.
                    tensors = {"gradient": rows / hidden.step_targets}
                    with suppress(LaneError):
                        member.session.lane.send(Kind.GRADIENT, step, index, tensors)

        return backward

    def _take_step(self, squared_norms: float) -> None:
        """Clip over all parties, answer all members, and let the optimizer work."""
        self._branch.scale(1 / self._counted)
        factor, norm = self._branch.clip(squared_norms)
        self._counted = 0
        with self._lock:
            step, members = self._step, self._in_order()
            self._step += 1
            self._next = 0
            for member in members:
                member.micro_batches = None
        for member in members:
            member.session.account.steps += 1
            with suppress(LaneError):
                member.session.lane.send(Kind.STEP, step, fields={"factor": factor, "norm": norm})
        self._branch.step(self._rate.first_step + step, self._rate.total_steps)

    def _clean(self) -> None:
        """Leave nothing of an unfinished step when nobody is there to finish it."""
        with self._lock:
            if self._members:
                return
            self._compute.withdraw(self)
            self._stacks.clear()
            self._pending = 0
        self._compute.release(self._held)
        self._held = self._counted = 0
        self._branch.forget_gradients()

    def _account(self, stacked: Stacked, seconds: float) -> None:
        """Divide the time that a job took among the members, by their tokens."""
        total = sum(hidden.tokens for hidden in stacked.parts.values())
        for member, hidden in stacked.parts.items():
            member.session.account.seconds_computing += seconds * hidden.tokens / total


def _behind(members: list[Member], have_come: list[bool]) -> list[Member]:
    """Give those who haven't come where others have."""
    behind = [member for member, has in zip(members, have_come, strict=True) if not has]
    return behind if len(behind) < len(members) else []
