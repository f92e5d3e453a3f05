"""What a client may not do in a round of training, and the reason that the server gives."""

import pytest
import torch

from split.protocol.errors import ProtocolError
from split.protocol.frames import Frame, Kind
from split.protocol.training import RoundLimits, RoundPlan, TrainingRound

PLAN = {"steps": 3, "first_step": 0, "total_steps": 3, "longest": 16, "wants_gradient": True}
COUNTS = {"targets": 3, "step_targets": 3, "micro_batches": 1, "side": "right"}
MAX_PLAN = RoundPlan(steps=8, first_step=0, total_steps=8, seed=0)
LIMITS = RoundLimits(
    window=4, activation_budget=1000, lanes=1, columns_before=0, micro_batches=9, rows=18
)
ANSWER = "the server answers a micro-batch"


def join(**changes) -> Frame:
    return Frame(Kind.JOIN, fields=PLAN | changes)


def hidden(index=0, step=0, rows=2, columns=8, lengths=True, **counts) -> Frame:
    tensors = {"hidden": torch.zeros(rows, columns, 4)}
    if lengths:
        tensors["lengths"] = torch.full((rows,), columns, dtype=torch.int32)
    return Frame(Kind.HIDDEN, step, index, tensors, COUNTS | counts)


def gradient(rows=2) -> Frame:
    return Frame(Kind.GRADIENT, tensors={"gradient": torch.zeros(rows, 8, 4)})


def end_of_step(squared_norm=1.0) -> Frame:
    return Frame(Kind.STEP, fields={"squared_norm": squared_norm})


STEP = [hidden(), ANSWER, gradient(), end_of_step()]
SECOND = {"micro_batches": 2, "step_targets": 7}
MANY = {"micro_batches": 9, "step_targets": 27}
LONG_STEP = {"micro_batches": 2, "step_targets": 6, "rows": 10, "columns": 1}
# Frames, of which the last is refused, and words of the reason.
REFUSED = {
    "without joining": ([hidden()], "began with"),
    "another step": ([join(), hidden(step=1)], "step 1 in step 0"),
    "another order": ([join(), hidden(1, micro_batches=2)], "expected 0"),
    "twice": ([join(), hidden(micro_batches=2), hidden(micro_batches=2)], "expected 1"),
    "no targets": ([join(), hidden(targets=0)], "does not fit a step"),
    "too large": ([join(), hidden(columns=9)], "received 18 padded tokens"),
    "beyond its credits": ([join(), *(hidden(n, **MANY) for n in range(5))], "in flight"),
    "a gradient of nothing": ([join(), gradient()], "before the output"),
    "a gradient of no answer": ([join(), hidden(), gradient()], "before the output"),
    "a gradient of another shape": ([join(), hidden(), ANSWER, gradient(rows=1)], "shape"),
    "a step without gradients": ([join(), hidden(), end_of_step()], "before all its gradients"),
    "a step of nothing": ([join(), end_of_step()], "before all its gradients"),
    "an impossible norm": ([join(), *STEP[:-1], end_of_step(-1.0)], "squared_norm"),
    "a norm in words": ([join(), *STEP[:-1], end_of_step("1")], "squared_norm"),
    "an end within a step": ([join(), hidden(), Frame(Kind.END)], "ended after 0 of 3 steps"),
    "an end without steps": ([join(), Frame(Kind.END)], "the round ended after 0 of 3 steps"),
    "a step too many": (
        [join(steps=1, total_steps=1), *STEP, hidden(step=1)],
        "the round has only 1 steps",
    ),
    "an average within a step": ([join(), hidden(), Frame(Kind.AVERAGE)], "within a step"),
    "another kind": ([join(), Frame(Kind.WELCOME)], "WELCOME frame is not allowed"),
    "no lengths": ([join(), hidden(lengths=False)], "without the lengths"),
    "padding on the left": ([join(), hidden(side="left")], "on the right"),
    "more steps than its examples allow": ([join(steps=11, total_steps=11)], "steps = 11"),
    "a later step than its rounds allow": ([join(first_step=1)], "first_step = 1"),
    "a longer run than its rounds allow": ([join(total_steps=11)], "total_steps = 11"),
    "more steps than its whole run": ([join(total_steps=2)], "don't fit a run with 3 steps"),
    "no number of steps": ([join(steps=True)], "expected a whole number"),
    "a micro-batch above the budget": ([join(longest=1001)], r"split\.activation-budget = 1000"),
    "more targets than tokens": (
        [join(), hidden(targets=17, step_targets=17)],
        "16 tokens has 17 targets",
    ),
    "more targets in a step than fit": ([join(), hidden(step_targets=2**62)], "a step of 4611686"),
    "targets that do not add up": (
        [join(), hidden(**SECOND), hidden(1, **SECOND)],
        "7 announced targets has 6 after 2 of 2",
    ),
    "other counts than announced": (
        [join(), hidden(**SECOND), hidden(1, **(SECOND | {"step_targets": 6}))],
        "changed from",
    ),
    "more micro-batches than a step has": (
        [join(), hidden(micro_batches=10)],
        r"train\.accumulation",
    ),
    "more rows than a step has": (
        [join(), hidden(**LONG_STEP), hidden(1, **LONG_STEP)],
        r"train\.batch-size × train\.accumulation",
    ),
}


def receive(frames, max_plan=MAX_PLAN) -> None:
    round_ = TrainingRound(max_plan, LIMITS)
    round_.join(frames[0])
    for frame in frames[1:]:
        if frame is ANSWER:
            round_.answered += 1
        else:
            round_.receive(frame)


@pytest.mark.parametrize("what", REFUSED)
def test_frames_that_are_not_allowed_are_refused(what):
    frames, reason = REFUSED[what]
    if len(frames) > 1:
        receive(frames[:-1])
    with pytest.raises(ProtocolError, match=reason):
        receive(frames)


def test_each_token_may_be_a_target_and_a_norm_a_whole_number():
    receive([join(), hidden(targets=16, step_targets=16), ANSWER, gradient(), end_of_step(1)])


@pytest.mark.parametrize(("steps", "first", "total"), [(8, 0, 8), (3, 1, 6), (8, 8, 15)])
def test_steps_are_counted_from_the_first_round(steps, first, total):
    """The client's second round of two, with at most 8 steps in each."""
    max_plan = RoundPlan(steps=8, first_step=8, total_steps=16, seed=0)
    with pytest.raises(ProtocolError, match=f"first_step = {first} and total_steps = {total} don"):
        receive([join(steps=steps, first_step=first, total_steps=total)], max_plan)
