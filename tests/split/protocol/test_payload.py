import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.errors import FrameError, ProtocolError
from split.protocol.frames import Frame, Kind, check_size
from split.protocol.payload import Outgoing
from tests.split.payloads import HIDDEN, hidden_frame, limits, pack, round_trip, tokens, unpack


def test_float32_travels_exactly():
    sent = hidden_frame(tokens(), loss=0.1)
    came = round_trip(sent, limits())
    assert came.tensors["hidden"].dtype is torch.float32
    assert torch.equal(came.tensors["hidden"], sent.tensors["hidden"])
    assert came.tensors["lengths"].tolist() == [64, 1]
    assert came.tensors["lengths"].dtype is torch.int32
    assert came.fields == {"side": "left", "loss": 0.1}
    assert (came.kind, came.step, came.micro_batch) == (Kind.HIDDEN, 1, 2)


def test_bfloat16_is_rounded_as_torch_rounds():
    sent = tokens()
    came = round_trip(hidden_frame(sent), limits("bfloat16")).tensors["hidden"]
    assert came.dtype is torch.bfloat16
    assert torch.equal(came, sent.bfloat16())


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.floats(-44, 38))
def test_int8_is_off_by_half_a_scale_at_most(seed, exponent):
    sent = tokens(seed % 1000, scale=10.0**exponent).clamp(-3e38, 3e38)
    sent[0, 0] = 0
    came = round_trip(hidden_frame(sent), limits("int8")).tensors["hidden"]
    assert came.dtype is torch.float32
    scale = (sent.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    assert ((came.double() - sent.double()).abs() <= scale.double() * (0.5 + 1e-4)).all()
    assert (came[0, 0] == 0).all()


def test_bfloat16_and_views_are_quantised_too():
    sent = tokens(rows=64, columns=2).transpose(0, 1).bfloat16()
    came = round_trip(hidden_frame(sent), limits("int8")).tensors["hidden"]
    assert torch.allclose(came, sent.float(), atol=0.03)


@pytest.mark.parametrize(("wire", "most"), [("float32", 2.02), ("bfloat16", 1.01), ("int8", 0.52)])
def test_bytes_against_raw_bfloat16(wire, most):
    sent = tokens(rows=2, columns=128)
    assert len(pack(hidden_frame(sent), limits(wire))) <= most * sent.numel() * 2


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_at_the_sender(wire, number):
    sent = tokens()
    sent[1, 3, 5] = number
    with pytest.raises(FrameError, match="'hidden' contains NaN"):
        pack(hidden_frame(sent), limits(wire))


def test_what_is_not_finite_in_an_adapter_is_refused():
    with pytest.raises(FrameError, match="'a' contains NaN"):
        pack(Frame(Kind.AVERAGE, tensors={"a": torch.tensor([1.0, float("nan")])}), limits())


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_at_the_receiver(wire, number):
    content = bytearray(pack(hidden_frame(tokens()), limits(wire)))
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(bytes(content[8 : 8 + length]))
    begin = 8 + length + header["hidden"]["data_offsets"][0]
    dtype = getattr(torch, wire)
    torch.frombuffer(content, dtype=dtype, count=1, offset=begin)[0] = number
    with pytest.raises(FrameError, match="NaN"):
        unpack(content, Kind.HIDDEN, limits(wire))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 3.4e38])
def test_a_scale_out_of_range_is_refused_at_the_receiver(number):
    content = bytearray(pack(hidden_frame(tokens()), limits("int8")))
    (length,) = struct.unpack_from("<Q", content)
    begin = json.loads(bytes(content[8 : 8 + length]))["hidden.scale"]["data_offsets"][0]
    torch.frombuffer(content, dtype=torch.float32, count=1, offset=8 + length + begin)[0] = number
    with pytest.raises(FrameError):
        unpack(content, Kind.HIDDEN, limits("int8"))


@pytest.mark.parametrize("seen", [1, 10**3, 10**9, 10**12])
def test_fields_do_not_move_the_numbers(seen):
    """By where in memory they begin, products of the same numbers come out otherwise."""
    frame = hidden_frame(tokens())
    frame.fields["seen"] = seen
    content = pack(frame, limits())
    assert (8 + struct.unpack_from("<Q", content)[0]) % 64 == 0


def test_adapters_travel_as_they_are():
    sent = {
        "layers.0.lora_A.weight": torch.randn(4, 16),
        "norm": torch.randn(3).double(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "count": torch.tensor([2**40, -1]),
        "lengths": torch.tensor([1, 2], dtype=torch.int32),
    }
    came = round_trip(Frame(Kind.AVERAGE, tensors=sent), limits()).tensors
    assert came.keys() == sent.keys()
    for name, tensor in sent.items():
        assert came[name].dtype is tensor.dtype
        assert torch.equal(came[name], tensor)


def test_the_library_reads_what_is_written_here():
    sent = {"b": torch.randn(3, 5), "a": torch.arange(3)}
    content = pack(Frame(Kind.AVERAGE, tensors=sent, fields={"weight": 3}), limits())
    came = safetensors.torch.load(content)
    assert all(torch.equal(came[name], tensor) for name, tensor in sent.items())


def test_what_the_library_writes_is_read_here():
    sent = {"b": torch.randn(3, 5), "a": torch.arange(3), "c": torch.randn(7).double()}
    content = safetensors.torch.save(sent, {"weight": "3"})
    came = unpack(content, Kind.AVERAGE, limits())
    assert all(torch.equal(came.tensors[name], tensor) for name, tensor in sent.items())
    assert came.fields == {"weight": 3}


FIELDS = st.dictionaries(
    st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__"),
    st.text(max_size=50)
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False),
    max_size=5,
)


@settings(max_examples=100)
@given(FIELDS)
def test_fields_travel_with_their_types(fields):
    came = round_trip(Frame(Kind.STEP, fields=fields), limits()).fields
    assert came == fields
    assert [type(value) for value in came.values()] == [type(value) for value in fields.values()]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**63, "x" * 5000, None, [1], torch.ones(1), b"x"]
)
def test_other_fields_are_refused(value):
    with pytest.raises(FrameError, match="field 'x'"):
        Outgoing(Frame(Kind.STEP, fields={"x": value}), limits())


# Frames that meet a limit, and exceed it by one.
AT_A_LIMIT = {
    "name": lambda more: Frame(Kind.STEP, fields={"n" * (256 + more): 1}),
    "text": lambda more: Frame(Kind.STEP, fields={"x": "t" * (4096 + more)}),
    "negative number": lambda more: Frame(Kind.STEP, fields={"x": -(2**63) - more}),
    "step": lambda more: Frame(Kind.STEP, step=2**32 - 1 + more),
    "micro-batch": lambda more: Frame(Kind.STEP, micro_batch=2**32 - 1 + more),
    "tokens": lambda more: Frame(
        Kind.HIDDEN, tensors={"hidden": torch.zeros(1, 512 + more, HIDDEN)}
    ),
    "dimensions": lambda more: Frame(Kind.AVERAGE, tensors={"a": torch.zeros([1] * (8 + more))}),
    "description": lambda more: Frame(  # which fills a record
        Kind.AVERAGE,
        fields={f"{n:03}": "t" * 4078 for n in range(256)} | {"rest": "t" * (1240 + more)},
    ),
}


@pytest.mark.parametrize("what", AT_A_LIMIT)
def test_a_limit_may_be_met_exactly(what):
    frame = AT_A_LIMIT[what](0)
    came = round_trip(frame, limits())
    assert came.fields == frame.fields
    assert [t.shape for t in came.tensors.values()] == [t.shape for t in frame.tensors.values()]
    with pytest.raises(FrameError):
        round_trip(AT_A_LIMIT[what](1), limits())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"hidden": torch.zeros(2, 4, HIDDEN + 1)}, "same base model"),
        ({"hidden": torch.zeros(4, HIDDEN)}, "shape"),
        ({"hidden": torch.zeros(0, 4, HIDDEN)}, "shape"),
        ({"hidden": torch.zeros(2, 257, HIDDEN)}, "at most 512"),
        ({"hidden": torch.zeros(2, 4, HIDDEN).long()}, "floating-point"),
        ({"gradient": torch.zeros(2, 4, HIDDEN)}, "has tensors"),
        ({}, "has tensors"),
        ({"hidden": torch.zeros(2, 4, HIDDEN), "mask": torch.zeros(2, 4).long()}, "has tensors"),
    ],
)
def test_other_hidden_states_are_refused(tensors, words):
    with pytest.raises(FrameError, match=words):
        Outgoing(Frame(Kind.HIDDEN, tensors=tensors), limits())


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_those_of_any_model_are_refused(sign):
    most = torch.tensor([1.0, sign * 2.0**30])
    check_size(most, "a")
    with pytest.raises(ProtocolError, match="beyond 2³⁰"):
        check_size(most * 1.001, "a")


@pytest.mark.parametrize(
    ("lengths", "side"),
    [
        (torch.tensor([5, 0]), "left"),
        (torch.tensor([65, 1]), "left"),
        (torch.tensor([1]), "left"),
        (torch.tensor([1.0, 2.0]), "left"),
        (torch.tensor([True, True]), "left"),
        (torch.tensor([1, 64]), "top"),
        (torch.tensor([1, 64]), None),
    ],
)
def test_other_paddings_are_refused(lengths, side):
    fields = {} if side is None else {"side": side}
    frame = Frame(Kind.HIDDEN, tensors={"hidden": tokens(), "lengths": lengths}, fields=fields)
    with pytest.raises(FrameError, match=r"lengths|columns"):
        Outgoing(frame, limits())


@pytest.mark.parametrize("lengths", [[0, 1], [65, 1], [-1, 1]])
def test_other_paddings_are_refused_at_the_receiver(lengths):
    content = pack(hidden_frame(tokens()), limits())
    sound = struct.pack("<ii", 64, 1)
    assert content.count(sound) == 1
    with pytest.raises(FrameError, match="expected 1 to 64"):
        unpack(content.replace(sound, struct.pack("<ii", *lengths)), Kind.HIDDEN, limits())


def test_other_types_are_refused():
    for tensor in (torch.ones(2).half(), torch.ones(2).bfloat16(), torch.ones(2).bool()):
        with pytest.raises(FrameError, match="can't be sent"):
            Outgoing(Frame(Kind.AVERAGE, tensors={"a": tensor}), limits())


def test_the_receiver_wants_the_agreed_type():
    content = pack(hidden_frame(tokens()), limits())
    for wire in ("bfloat16", "int8"):
        with pytest.raises(FrameError):
            unpack(content, Kind.HIDDEN, limits(wire))


def test_a_payload_may_not_be_larger_than_agreed():
    exact = Frame(Kind.AVERAGE, tensors={"a": torch.zeros(218)})
    assert round_trip(exact, limits(average_bytes=1000)).tensors
    small = limits(average_bytes=1000)
    with pytest.raises(FrameError, match="at most 1000"):
        Outgoing(Frame(Kind.AVERAGE, tensors={"a": torch.zeros(300)}), small)
    with pytest.raises(FrameError, match="at most 1000"):
        unpack(
            pack(Frame(Kind.AVERAGE, tensors={"a": torch.zeros(300)}), limits()),
            Kind.AVERAGE,
            small,
        )


def test_a_frame_shows_no_numbers():
    frame = Frame(
        Kind.HIDDEN, tensors={"hidden": torch.full((1, 1, 3), 0.123)}, fields={"x": 0.456}
    )
    assert "123" not in repr(frame)
    assert "456" not in repr(frame)
    assert "(1, 1, 3)" in repr(frame)
