"""Payloads that no honest end would send are refused with a specific error."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.errors import FrameError
from split.protocol.frames import Kind
from tests.split.payloads import HIDDEN, hidden_frame, limits, pack, tokens, unpack


def described(text, data=b""):
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        bytes(7),
        bytes(8),
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 8) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        described(b"[]"),
        described(b"null"),
        described(b"{"),
        described(b"\xff"),
        described(b"[" * 100_000),
        described(b'{"a":' * 20_000),
        described(b'{"__metadata__":{},"__metadata__":{}}'),
        described(b'{"__metadata__":{"a":1}}'),
        described(b'{"__metadata__":{"a":"NaN"}}'),
        described(b'{"__metadata__":{"a":"[1]"}}'),
        described(b'{"__metadata__":{"a":"' + b"9" * 30 + b'"}}'),
        described(b'{"__metadata__":{"a":"' + b"9" * 5000 + b'"}}'),
        described(b'{"__metadata__":[]}'),
        described(b'{"a":{}}'),
        described(b'{"a":NaN}'),
        *(
            described(json.dumps({"a": item}).encode(), bytes(8))
            for item in (
                entry(dtype="F16"),
                entry(dtype="BOOL"),
                entry(dtype="BF16", shape=(4,)),
                entry(dtype=[]),
                entry(dtype=None),
                entry(shape=(3,)),
                entry(shape=(-2,)),
                entry(shape=(2.0,)),
                entry(shape=(True, 2)),
                entry(shape=("2",)),
                entry(shape=(1,) * 8 + (2,)),
                entry(shape=(2**62, 2**62)),
                entry(shape=(), offsets=(4, 8)),
                entry(offsets=(8, 16)),
                entry(offsets=(8, 0)),
                entry(offsets=(-8, 0)),
                entry(offsets=(0, 8, 8)),
                entry(shape=(3,), offsets=(0, 12)),
                entry() | {"more": 1},
            )
        ),
        described(json.dumps({"": entry()}).encode(), bytes(8)),
        described(json.dumps({"a" * 257: entry()}).encode(), bytes(8)),
        described(json.dumps({"a": entry()}).encode(), bytes(9)),
        described(json.dumps({"a": entry(), "b": entry()}).encode(), bytes(8)),
        described(json.dumps({"a": entry(), "b": entry(offsets=(4, 12))}).encode(), bytes(12)),
        described(
            json.dumps(
                {"a": entry(shape=(1,), offsets=(0, 4)), "b": entry("F64", (1,), (4, 12))}
            ).encode(),
            bytes(12),
        ),
    ],
)
def test_malformed_payloads_are_refused(content):
    with pytest.raises(FrameError) as raised:
        unpack(content, Kind.AVERAGE, limits())
    assert raised.value.__cause__ is None


def test_descriptions_of_hidden_states_are_checked_whole():
    with pytest.raises(FrameError, match="scale"):
        unpack(
            described(
                json.dumps(
                    {
                        "hidden.scale": entry(shape=(1,), offsets=(0, 4)),
                        "hidden": entry("I8", (1, 2, HIDDEN), (4, 4 + 2 * HIDDEN)),
                    }
                ).encode(),
                bytes(4 + 2 * HIDDEN),
            ),
            Kind.HIDDEN,
            limits("int8"),
        )


@settings(max_examples=300)
@given(st.data())
def test_damaged_payloads_are_refused_or_read_but_never_break(data):
    content = bytearray(pack(hidden_frame(tokens(rows=2, columns=2)), limits()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 400))
        content[place] = data.draw(st.integers(0, 255))
    try:
        frame = unpack(bytes(content), Kind.HIDDEN, limits())
    except FrameError:
        return
    assert frame.tensors["hidden"].shape == (2, 2, HIDDEN)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(list(Kind)))
def test_random_payloads_are_refused(content, kind):
    with pytest.raises(FrameError):
        unpack(described(content, content), kind, limits())
