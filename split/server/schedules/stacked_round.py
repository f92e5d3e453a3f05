"""A round in which the clients' micro-batches are stacked (FL-GLM section 3.3, client-batch).

Micro-batch j of all clients (*members*) is padded, stacked and computed once, and each step ends
with one step of the body's optimizer. The body's gradient is Σ w_i·g_i, where g_i is the gradient
of client i, and w_i its share of all targets; each client's head and tail receive the gradient of
that client only. If a member leaves, the others continue: only its finished micro-batches count,
and the shares w_i are computed from the micro-batches that count.

A member's gradients and targets are capped (``GradientCap``) before the backward pass, except in
the gradient for its own head. So is its reported norm of the gradients of the head and tail, in the
norm over all parties; for the member itself, it counts fully, which scales down these gradients.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

import torch

from finetuning.errors import printable
from finetuning.randomness import derive_seed
from split.model.part import Activations
from split.protocol.errors import LaneError, ProtocolError
from split.protocol.frames import Kind
from split.protocol.training import HeadOutput, OutputGradient, RoundPlan, StepEnd
from split.server.body_adapters import BodyAdapters
from split.server.compute import ComputeThread, Job, Priority
from split.server.passes import Passes
from split.server.schedules.gradient_cap import GradientCap
from split.server.schedules.stacked_micro_batch import Gradient, Member, StackedMicroBatch, stack
from split.server.schedules.wait_budget import WaitBudget
from split.server.session import Session, describe_lane_error
from split.server.stage_client import StageError
from split.settings import SplitSettings

_log = logging.getLogger(__name__)


class StackedRound:
    """The stacked computation of all clients of a round; ``seed`` is for the body's dropout."""

    def __init__(
        self, adapters: BodyAdapters, compute: ComputeThread, seed: int, split: SplitSettings
    ) -> None:
        self._adapters = adapters
        self._compute = compute
        self._seed = seed
        self._split = split
        self._lock = threading.RLock()
        self._members: dict[str, Member] = {}
        self._waits = WaitBudget()
        self._stacked: deque[StackedMicroBatch] = deque()  # micro-batches waiting for gradients
        self._unfinished = 0  # number of micro-batches whose backward pass has been queued
        self._next = 0  # index of the micro-batch to stack next
        self._step = 0
        # Used only by the compute thread.
        self._cap = GradientCap(split.share_cap)
        self._counted = 0.0  # number of targets whose gradients are in the body's gradient
        self._passes = Passes(compute, partial(self._put, Priority.CLEANUP))

    def add(self, session: Session, plan: RoundPlan) -> Member:
        """Add a client. Call before the first step."""
        with self._lock:
            member = Member(session, plan)
            self._members[member.client] = member
            self._waits.add(session)
            self._choose_rate()
            return member

    def accept_hidden(self, member: Member, output: HeadOutput) -> None:
        """Accept the hidden states of a micro-batch after the head.

        Raise a ProtocolError for a micro-batch of the next step while this step isn't answered yet.
        """
        with self._lock:
            # Otherwise, the end of this step would reset the counts of the next one.
            if member.squared_norm is not None:
                raise ProtocolError("received a micro-batch before the last step was answered")
            if member.received == member.finished:  # the member doesn't owe a gradient
                self._waits.restart(member.client)
            member.micro_batches = output.micro_batches
            member.outputs[output.index] = output
            member.received += 1
            self._advance()

    def accept_gradient(self, member: Member, gradient: OutputGradient) -> None:
        """Accept the gradient of a step's mean loss with respect to a micro-batch's output."""
        # float64 takes ten times as long and is not needed: no accepted number is above 2³⁰.
        norms = torch.linalg.vector_norm(gradient.gradient, dim=2, dtype=torch.float32)
        size = float(norms.sum(dtype=torch.float64))
        with self._lock:
            self._waits.restart(member.client)
            member.gradients[gradient.index] = Gradient(gradient.gradient, size)
            member.returned += 1
            self._advance()

    def end_step(self, member: Member, end: StepEnd) -> None:
        """Accept the end of a member's step."""
        with self._lock:
            member.squared_norm = end.squared_norm
            self._advance()

    def remove(self, member: Member) -> None:
        """Remove a member; the others continue without it."""
        with self._lock:
            del self._members[member.client]
            self._waits.remove(member.client)
            self._choose_rate()
            self._advance()
        self._compute.call(lambda: self._clean(member))

    def waits(self, member: Member) -> bool:
        """Return whether the member need not send a frame; end the lanes of late members."""
        with self._lock:
            self._note_waiting()
            self._waits.end_late(self._split.gather_timeout)
            return not member.is_due

    def failed(self, error: BaseException) -> None:
        """End all lanes after an error in a stacked job.

        Clients are told only of lost stages and out-of-memory errors, because other errors may
        contain data of one client.
        """
        reason = "the server failed to compute the clients' micro-batches"
        if isinstance(error, torch.OutOfMemoryError | ConnectionError):
            reason = describe_lane_error(error)
        elif isinstance(error, StageError):
            reason = error.public
        _log.error("a stacked computation failed: %s", ascii(f"{type(error).__name__}: {error}"))
        with self._lock:
            for member in self._members.values():
                member.session.give_up(reason)

    def _advance(self) -> None:
        """Queue all jobs whose inputs have arrived."""
        members = [self._members[client] for client in sorted(self._members)]
        while needed := [member for member in members if member.needs(self._next)]:
            if any(self._next not in member.outputs for member in needed):
                break
            parts = {member: member.outputs.pop(self._next) for member in needed}
            for stacked in stack(self._next, parts, self._split.activation_budget):
                self._stacked.append(stacked)
                run = partial(self._run_blocks, stacked, self._step, time.perf_counter())
                self._put(Priority.FORWARD, run, stacked.budget_tokens)
            self._next += 1
        # Queue backward passes in this order: the rounding of the gradients' sum depends on it.
        while self._stacked and self._stacked[0].computed:
            stacked = self._stacked[0]
            present = self._present(stacked)
            if any(stacked.index not in member.gradients for member in present):
                break
            gradients = {member: member.gradients.pop(stacked.index) for member in present}
            self._stacked.popleft()
            self._unfinished += 1
            propagate = partial(self._propagate_back, stacked, gradients, self._step)
            self._put(Priority.BACKWARD, propagate)
        norms = {m: m.squared_norm for m in members if m.squared_norm is not None}
        # A stacked micro-batch may still be queued even if all of its members have left.
        is_open = self._stacked or self._unfinished
        if members and self._next and not is_open and len(norms) == len(members):
            self._next = 0
            self._put(Priority.STEP, partial(self._take_step, norms))
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Update the wait budget with the members that others now wait for."""
        due = [client for client, member in self._members.items() if member.is_due]
        self._waits.note(due if len(due) < len(self._members) else [])

    def _note_computed(self, stacked: StackedMicroBatch) -> None:
        with self._lock:
            stacked.computed = True
            for member in stacked.parts:
                member.answered += 1
            self._advance()

    def _present(self, stacked: StackedMicroBatch) -> list[Member]:
        return [m for m in stacked.parts if self._members.get(m.client) is m]

    def _put(self, priority: Priority, work: Callable[[], None], tokens: int = 0) -> None:
        self._compute.put(Job(self, priority, work, tokens))

    def _run_blocks(self, stacked: StackedMicroBatch, step: int, queued: float) -> None:
        started = time.perf_counter()
        self._passes.held += stacked.budget_tokens
        if not self._present(stacked):
            self._note_computed(stacked)
            return
        index = stacked.index
        passes = (stacked.number,) if stacked.number else ()
        seed = derive_seed("dropout", derive_seed(self._seed, step), index, "body", *passes)
        wanted = any(member.plan.wants_gradient for member in stacked.parts)
        hidden, padding = stacked.hidden()
        begun = self._adapters.run_blocks(hidden, padding, seed, wanted)
        for member, part in stacked.parts.items():
            member.session.account.tokens += part.padded_tokens
            member.session.account.seconds_queued += started - queued
        self._passes.when_complete(begun, partial(self._answer, stacked, step))
        stacked.account(time.perf_counter() - started)

    def _answer(self, stacked: StackedMicroBatch, step: int, activations: Activations) -> None:
        stacked.activations = activations
        self._note_computed(stacked)
        for member, _, rows in stacked.rows_of(activations.output):
            # Copy the rows: a view would keep all rows in memory until it is acknowledged.
            own = rows.detach().clone() if len(stacked.parts) > 1 else rows
            with suppress(LaneError):  # the end of one lane must not affect the others
                member.session.answer(step, stacked.index, own)

    def _propagate_back(
        self, stacked: StackedMicroBatch, gradients: Mapping[Member, Gradient], step: int
    ) -> None:
        """Compute a backward pass without the gradients of members that have left."""
        started = time.perf_counter()
        activations, stacked.activations = stacked.activations, None
        if activations is None or not gradients:
            if activations is not None:
                self._adapters.discard(activations)
            self._note_finished(stacked, ())
            return
        additions = stacked.additions(gradients)
        factors, counted = self._cap.factors(additions), self._cap.counted(additions)
        late, late_targets = self._cap.late_factors()
        if late < 1:
            # Scale the body's gradient so far: none of its terms could be compared on arrival.
            self._adapters.scale(late)
        gradient = stacked.gradient(gradients, factors, activations.output)
        begun = self._adapters.propagate_back(activations, gradient)
        self._counted = self._counted * late_targets + counted
        # To undo the scaling: clients get the gradients of their mean losses over the step.
        scales = {m: stacked.parts[m].step_targets * factors[m.client] for m in gradients}
        self._passes.when_complete(begun, partial(self._answer_gradients, stacked, scales, step))
        stacked.account(time.perf_counter() - started)

    def _answer_gradients(
        self,
        stacked: StackedMicroBatch,
        scales: Mapping[Member, float],
        step: int,
        result: torch.Tensor | None,
    ) -> None:
        self._note_finished(stacked, scales)
        if result is None:
            return
        for member, _, rows in stacked.rows_of(result):
            if member in scales and member.plan.wants_gradient:
                tensors = {"gradient": rows / scales[member]}
                with suppress(LaneError):
                    member.session.lane.send(Kind.GRADIENT, step, stacked.index, tensors)

    def _note_finished(self, stacked: StackedMicroBatch, members: Iterable[Member]) -> None:
        """Note the end of a backward pass, in which these members' gradients were propagated."""
        self._passes.release(stacked.budget_tokens)
        with self._lock:
            self._unfinished -= 1
            for member in members:
                member.finished += 1
            self._advance()

    def _take_step(self, squared_norms: Mapping[Member, float]) -> None:
        """Clip the gradients, answer all members, and take a step of the optimizer."""
        self._adapters.scale(1 / self._counted)
        self._counted = 0.0
        reported = {member.client: square for member, square in squared_norms.items()}
        factors = self._cap.end_step(reported)
        capped = {client: square * factors[client] ** 2 for client, square in reported.items()}
        factor, norm = self._adapters.clip(sum(capped.values()))
        with self._lock:
            step = self._step
            self._step += 1
            for member in squared_norms:
                member.begin_step()
            self._note_waiting()
        for member in squared_norms:
            member.session.account.steps += 1
            fields = {"factor": factor, "norm": norm}
            if factors[member.client] < 1:
                own = (norm**2 - capped[member.client] + reported[member.client]) ** 0.5
                fields = {"factor": self._adapters.clip_factor(own), "norm": own}
            with suppress(LaneError):
                member.session.lane.send(Kind.STEP, step, fields=fields)
        self._adapters.step(self._rate.first_step + step, self._rate.total_steps)

    def _choose_rate(self) -> None:
        """Use the learning rate schedule of the member with the most steps in the whole run."""
        if self._members:
            last = max(self._members.values(), key=lambda m: (m.plan.total_steps, m.client))
            self._rate = last.plan

    def _clean(self, left: Member) -> None:
        """Clean up after a member has left; after the last one, discard the unfinished step."""
        times = left.session.account.capped = self._cap.times_capped(left.client)
        if times:
            _log.warning(
                "%s was capped %d times, at split.share-cap = %g times other clients' median",
                printable(left.client),
                times,
                self._split.share_cap,
            )
        # Finished clients remain in the median for the others; clients that left early do not.
        if self._step < left.plan.steps:
            self._cap.remove(left.client)
        with self._lock:
            if self._members:
                return
            self._compute.withdraw(self)
            self._stacked.clear()
        self._passes.release(self._passes.held)
        self._counted = 0.0
        self._adapters.zero_grad()
