"""Evaluations: no sequence of frames lets a client exceed the limits."""

from functools import partial

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


def hidden(index, rows, columns, side, fields):
    lengths = torch.full((rows,), columns, dtype=torch.int32)
    tensors = {"hidden": torch.zeros(rows, columns, 4), "lengths": lengths}
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
