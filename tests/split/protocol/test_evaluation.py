"""Evaluations: no sequence of frames lets a client exceed the limits."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.errors import ProtocolError
from split.protocol.evaluation import (
    CachedExtension,
    Evaluation,
    ForwardPass,
    ModelChoice,
    Prompts,
)
from split.protocol.frames import Frame, Kind

PREFIXES = {"base": 0, "global": 3}
WINDOW, LONGEST, MAX_CACHED_TOKENS = 2, 12, 20


def hidden(index, rows, columns, side, fields, number=0.0):
    lengths = torch.full((rows,), columns, dtype=torch.int32)
    tensors = {"hidden": torch.full((rows, columns, 4), number), "lengths": lengths}
    return Frame(Kind.HIDDEN, 0, index, tensors, {"side": side} | fields)


def prompts(rows, columns, new_tokens):
    return hidden(0, rows, columns, "left", {"new_tokens": new_tokens})


def next_tokens(columns, drop, rows, frames):
    return hidden(frames, rows, columns, "left", {"drop": drop} if drop else {})


def endings(each, columns, rows, frames):
    return hidden(1, rows * each, columns, "right", {"endings": each})


small = st.integers(1, 4)
FIELDS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"new_tokens": small}),
    st.fixed_dictionaries({"endings": small}),
    st.fixed_dictionaries({"drop": st.integers(0, 3)}),
)
FRAMES = st.one_of(
    st.sampled_from([Frame(Kind.STEP), Frame(Kind.JOIN, fields={"model": "unknown"})]),
    st.sampled_from([Frame(Kind.JOIN, fields={"model": name}) for name in PREFIXES]),
    st.builds(prompts, small, small, small),
    st.builds(partial, st.just(next_tokens), small, st.integers(0, 4)),
    st.builds(partial, st.just(endings), small, small),
    st.builds(hidden, st.integers(0, 3), small, small, st.sampled_from(["left", "right"]), FIELDS),
)


@given(st.lists(st.tuples(FRAMES, st.booleans()), max_size=40))
@settings(max_examples=400)
def test_no_sequence_of_frames_exceeds_the_limits(steps):
    """Frames that are refused are left out; a lane would end there."""
    evaluation = Evaluation(PREFIXES, WINDOW, LONGEST, MAX_CACHED_TOKENS)
    prefix, in_flight, cached, room, texts = 0, 0, 0, 0, (1, 0)
    for sent, answered in steps:
        frame = sent(*texts) if callable(sent) else sent
        try:
            event = evaluation.receive(frame)
        except ProtocolError:
            event = None
        if isinstance(event, ModelChoice):
            assert not in_flight
            prefix, cached, room = PREFIXES[event.model], 0, 0
            evaluation.choosing = False
        elif isinstance(event, Frame):
            assert room and not in_flight
            cached = room = 0
        elif isinstance(event, Prompts):
            rows, columns = event.hidden.shape[:2]
            cached, room, texts = rows * (prefix + columns), event.tokens, (rows, 1)
            last = columns
        elif isinstance(event, ForwardPass):
            rows, columns = event.hidden.shape[:2]
            assert rows * (prefix + columns) <= LONGEST and not room
        elif isinstance(event, CachedExtension):
            rows, columns = event.hidden.shape[:2]
            cached = cached * max(event.endings, 1) + rows * (columns - event.drop)
            assert event.drop < last
            last, texts = columns, (texts[0], texts[1] + 1)
            assert not in_flight
        in_flight += isinstance(event, ForwardPass | CachedExtension)
        assert in_flight <= WINDOW
        assert cached <= room <= MAX_CACHED_TOKENS
        if answered and in_flight:
            in_flight -= 1
            evaluation.answered += 1


CHOICE = Frame(Kind.JOIN, fields={"model": "base"})
ANSWER = "the server answers"
PROMPTS = [CHOICE, ANSWER, prompts(2, 3, 4), ANSWER]
FORWARD = hidden(0, 2, 4, "right", {})
# Frames, of which the last is refused, and words of the reason.
REFUSED = {
    "no model": ([FORWARD], "HIDDEN frame is not allowed now"),
    "an unknown model": ([Frame(Kind.JOIN, fields={"model": "x"})], "'x' is not one of the models"),
    "two models at once": ([CHOICE, CHOICE], "before all answers of the last model"),
    "a model before an answer": ([CHOICE, ANSWER, FORWARD, CHOICE], "before all answers"),
    "beyond its credits": ([CHOICE, ANSWER, *[FORWARD] * 3], "more than 2 micro-batches"),
    "huge numbers": ([CHOICE, ANSWER, hidden(0, 2, 4, "right", {}, 3e38)], "beyond 2³⁰"),
    "too large": ([CHOICE, ANSWER, hidden(0, 3, 5, "right", {})], "received 15 padded tokens"),
    "too large with its prefix": (
        [Frame(Kind.JOIN, fields={"model": "global"}), ANSWER, hidden(0, 2, 4, "right", {})],
        "received 14 padded tokens",
    ),
    "more texts than agreed": ([CHOICE, ANSWER, prompts(3, 4, 3)], r"evaluate\.max-new-tokens"),
    "more tokens": ([*PROMPTS, next_tokens(5, 0, 2, 1)], "more than the agreed 4 tokens"),
    "other rows": ([*PROMPTS, next_tokens(1, 0, 3, 1)], "received 3 rows"),
    "another number": ([*PROMPTS, next_tokens(1, 0, 2, 2)], "as micro-batch 2"),
    "more dropped than sent": ([*PROMPTS, next_tokens(1, 3, 2, 1)], "3 tokens to drop"),
    "two in flight": ([CHOICE, ANSWER, prompts(2, 3, 4), prompts(2, 3, 4)], "in flight"),
    "tokens too early": ([*PROMPTS[:-1], next_tokens(1, 0, 2, 1)], "next tokens while"),
    "an early end": ([*PROMPTS[:-1], Frame(Kind.STEP)], "in flight"),
    "an end of nothing": ([CHOICE, ANSWER, Frame(Kind.STEP)], "STEP frame is not allowed now"),
    "padding on the right": (
        [CHOICE, ANSWER, hidden(0, 2, 3, "right", {"new_tokens": 4})],
        "padding on the right",
    ),
    "no new tokens": ([CHOICE, ANSWER, prompts(2, 3, 0)], "received 0 new tokens"),
    "endings of nothing": ([CHOICE, ANSWER, endings(2, 1, 2, 1)], "without their beginnings"),
    "endings of other rows": (
        [*PROMPTS, hidden(1, 3, 1, "right", {"endings": 2})],
        "3 rows as 2 endings of each of 2 texts",
    ),
    "no endings": ([*PROMPTS, hidden(1, 4, 1, "right", {"endings": 0})], "4 rows as 0 endings"),
    "negative endings": ([*PROMPTS, hidden(1, 4, 1, "right", {"endings": -2})], "endings = -2"),
    "a truth value": ([*PROMPTS, hidden(1, 2, 1, "right", {"endings": True})], "endings = True"),
    "countless endings": (
        [*PROMPTS, hidden(1, 4, 1, "right", {"endings": 2**62})],
        "endings of each of 2 texts",
    ),
    "endings as another micro-batch": (
        [*PROMPTS, hidden(2, 4, 1, "right", {"endings": 2})],
        "as micro-batch 2",
    ),
    "endings padded on the left": (
        [*PROMPTS, hidden(1, 4, 1, "left", {"endings": 2})],
        "padding on the left",
    ),
    "endings that are too long": ([*PROMPTS, endings(2, 1, 2, 1)], "endings need 16 tokens"),
    "endings after tokens": (
        [*PROMPTS, next_tokens(1, 0, 2, 1), ANSWER, hidden(2, 2, 1, "right", {"endings": 1})],
        "after 2 frames",
    ),
    "endings twice": (
        [*PROMPTS, endings(1, 1, 2, 1), ANSWER, hidden(2, 2, 1, "right", {"endings": 1})],
        "after 2 frames",
    ),
    "tokens after endings": (
        [*PROMPTS, endings(1, 1, 2, 1), ANSWER, next_tokens(1, 0, 2, 2)],
        "more than the agreed 4 tokens",
    ),
}


def receive(sent) -> None:
    evaluation = Evaluation(PREFIXES, WINDOW, LONGEST, MAX_CACHED_TOKENS)
    for frame in sent:
        if frame is not ANSWER:
            is_choice = isinstance(evaluation.receive(frame), ModelChoice)
        elif is_choice:
            evaluation.choosing = False
        else:
            evaluation.answered += 1


@pytest.mark.parametrize("what", REFUSED)
def test_frames_that_are_not_allowed_are_refused(what):
    frames, reason = REFUSED[what]
    receive(frames[:-1])
    with pytest.raises(ProtocolError, match=reason):
        receive(frames)
