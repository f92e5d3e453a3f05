import hashlib
import struct

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from split.protocol.errors import AlteredRecordError, FrameError, LaneCutError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.payload import Outgoing
from split.protocol.records import (
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    RECORD_BYTES,
    Opener,
    Sealer,
)

UP, DOWN = bytes([0x44]) * 32, bytes([0x55]) * 32
LIMITS = Limits(64, "float32", 65536, average_bytes=8 * 2**20)


def seal(sealer, frame, acknowledged=9):
    content = Outgoing(frame, LIMITS).write()
    return list(sealer.seal(frame, acknowledged, content))


def step(value=1):
    return Frame(Kind.STEP, 5, 6, fields={"x": value})


def large():
    """Return a frame that fills three records."""
    return Frame(Kind.AVERAGE, 5, 6, {"a": torch.arange(2**18 * 2 + 100, dtype=torch.float32)})


def opened(opener, sealed):
    frames = [opener.open(record) for record in sealed]
    return [frame for frame in frames if frame is not None]


def flipped(record, place, mask=1):
    return record[:place] + bytes([record[place] ^ mask]) + record[place + 1 :]


def test_frames_come_as_they_went():
    sealer, opener = Sealer(UP), Opener(UP, LIMITS)
    for frame in (step(1), large(), step(2)):
        sealed = seal(sealer, frame)
        assert all(len(record) <= MAX_RECORD_BYTES for record in sealed)
        (came,) = opened(opener, sealed)
        assert (came.kind, came.step, came.micro_batch) == (frame.kind, 5, 6)
        assert came.fields == frame.fields
        for name, tensor in frame.tensors.items():
            assert torch.equal(came.tensors[name], tensor)
    assert len(seal(sealer, large())) == 3


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_frames_of_whole_records(extra):
    frame = Frame(Kind.AVERAGE, tensors={"a": torch.zeros(2**18 + extra, dtype=torch.float32)})
    spare = Outgoing(frame, LIMITS).size - 2**20 - 4 * extra
    frame = Frame(Kind.AVERAGE, tensors={"a": torch.ones(2**18 - spare // 4 + extra)})
    sealed = seal(Sealer(UP), frame)
    assert len(sealed) == (2 if extra == 1 else 1)
    (came,) = opened(Opener(UP, LIMITS), sealed)
    assert torch.equal(came.tensors["a"], frame.tensors["a"])


def test_every_altered_byte_of_a_header_is_noticed():
    (record,) = seal(Sealer(UP), step())
    for place in range(HEADER_BYTES):
        for mask in (1, 2, 0x80):
            with pytest.raises(AlteredRecordError):
                Opener(UP, LIMITS).open(flipped(record, place, mask))
    assert Opener(UP, LIMITS).open(record) is not None


def test_every_altered_byte_of_a_second_header_is_noticed():
    sealed = seal(Sealer(UP), large())
    for place in range(HEADER_BYTES):
        opener = Opener(UP, LIMITS)
        opener.open(sealed[0])
        with pytest.raises(AlteredRecordError):
            opener.open(flipped(sealed[1], place))


def test_every_altered_byte_of_a_small_record_is_noticed():
    (record,) = seal(Sealer(UP), step())
    for place in range(HEADER_BYTES, len(record)):
        with pytest.raises(AlteredRecordError, match="was altered"):
            Opener(UP, LIMITS).open(flipped(record, place))


@settings(max_examples=30)
@given(st.integers(0, 2), st.floats(0, 1), st.integers(1, 255))
def test_altered_bytes_of_large_frames_are_noticed(number, share, mask):
    sealed = seal(Sealer(UP), large())
    record = sealed[number]
    sealed[number] = flipped(record, int(share * (len(record) - 1)), mask)
    with pytest.raises(AlteredRecordError):
        opened(Opener(UP, LIMITS), sealed)


@pytest.mark.parametrize("places", [(-1, 0), (-16, -1), (HEADER_BYTES, HEADER_BYTES + 1)])
def test_shortened_records_are_noticed(places):
    (record,) = seal(Sealer(UP), step())
    shorter = record[: places[0]] + (record[places[1] :] if places[1] else b"")
    for altered in (shorter, record + b"\0", record[:HEADER_BYTES], record[:10], b""):
        with pytest.raises(AlteredRecordError):
            Opener(UP, LIMITS).open(altered)


@pytest.mark.parametrize(
    "order", [(0, 0), (1,), (0, 2), (0, 1, 1), (0, 1, 0), (1, 0), (0, 1, 3), (2, 1, 0)]
)
def test_repeated_moved_and_missing_records_are_noticed(order):
    sealer = Sealer(UP)
    sealed = [record for value in range(4) for record in seal(sealer, step(value))]
    with pytest.raises(AlteredRecordError, match="repeated, moved or left out"):
        opened(Opener(UP, LIMITS), [sealed[number] for number in order])


def test_a_counter_that_was_corrected_does_not_help():
    sealer = Sealer(UP)
    first, second = (record for value in range(2) for record in seal(sealer, step(value)))
    replayed = second[:16] + struct.pack(">Q", 0) + second[24:]
    with pytest.raises(AlteredRecordError, match="was altered"):
        Opener(UP, LIMITS).open(replayed)
    opener = Opener(UP, LIMITS)
    opener.open(first)
    with pytest.raises(AlteredRecordError, match="was altered"):
        opener.open(first[:16] + struct.pack(">Q", 1) + first[24:])


def test_records_of_another_lane_or_direction_are_noticed():
    (record,) = seal(Sealer(DOWN), step())
    with pytest.raises(AlteredRecordError, match="different lane or direction"):
        Opener(UP, LIMITS).open(record)


def test_a_frame_may_not_be_left_unfinished():
    sealer, opener = Sealer(UP), Opener(UP, LIMITS)
    assert opener.open(seal(sealer, large())[0]) is None
    assert opener.partial
    other = Sealer(UP)
    seal(other, step())
    with pytest.raises(FrameError, match="interrupted by another"):
        # The other frame follows with the right counter.
        opener.open(seal(other, step())[0])


def test_too_large_a_frame_is_refused_before_memory_is_allocated(monkeypatch):
    sealed = seal(Sealer(UP), large())
    exact = Limits(64, "float32", 65536, average_bytes=Outgoing(large(), LIMITS).size)
    assert opened(Opener(UP, exact), sealed)
    tight = Limits(64, "float32", 65536, average_bytes=2**21)

    def fail(*_, **__):
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(FrameError, match="at most 2097152"):
        Opener(UP, tight).open(sealed[0])


def test_a_wrong_shape_is_refused_with_the_first_record(monkeypatch):
    frame = Frame(Kind.HIDDEN, tensors={"hidden": torch.zeros(2, 4096, 64)})
    first = seal(Sealer(UP), frame)[0]
    allocated = []
    empty = torch.empty

    def note(size, **options):
        allocated.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", note)
    for agreed in (
        Limits(32, "float32", 65536),
        Limits(64, "float32", 8191),
        Limits(64, "float32", 8192, max_columns=4095),
    ):
        with pytest.raises(FrameError, match=r"agreed on"):
            Opener(UP, agreed).open(first)
    assert all(size <= RECORD_BYTES for size in allocated)


def header(kind=Kind.STEP, flags=1, counter=0, total=16, version=4):
    return struct.pack(">BBBxIIIQQ", version, kind, flags, 5, 6, 9, counter, total)


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (header(total=17), 16),
        (header(total=15), 16),
        (header(flags=0), 16),
        (header(flags=3), 16),
        (header(flags=2), 16),
        (header(kind=0), 16),
        (header(kind=11), 16),
        (header(kind=255), 16),
        (header(version=2), 16),
        (header(total=2**63), RECORD_BYTES),
        (header(kind=Kind.AVERAGE, flags=0, total=2**20 + 8), 2**19),
        (header(counter=1), 16),
    ],
)
def test_authentic_but_contradictory_headers_are_refused(head, size):
    nonce = bytes(12)
    record = head + AESGCM(UP).encrypt(nonce, bytes(size), head)
    with pytest.raises(FrameError) as raised:
        Opener(UP, LIMITS).open(record)
    assert type(raised.value) is FrameError  # not a cut


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_refused_by_name(content, with_header):
    with pytest.raises(FrameError):
        Opener(UP, LIMITS).open(
            header(total=max(1, len(content))) + content if with_header else content
        )


@pytest.mark.parametrize("counter", [2**32 + 1, 2**40 + 1, 2**63 + 1])
def test_every_bit_of_a_counter_is_in_the_nonce(counter):
    """A nonce that came twice would betray what both of its records contain."""
    sealer, opener = Sealer(UP), Opener(UP, LIMITS)
    sealer._counter = opener._counter = counter
    (record,) = seal(sealer, step())
    content = bytes(Outgoing(step(), LIMITS).write())
    head = header(counter=counter, total=len(content))
    nonce = struct.pack(">IQ", 0, counter)
    assert record == head + AESGCM(UP).encrypt(nonce, content, head)
    assert opener.open(record) is not None


def test_a_key_encrypts_no_more_than_it_may():
    sealer = Sealer(UP, max_bytes=80)
    for _ in range(2):  # of 40 bytes
        seal(sealer, step())
    with pytest.raises(LaneCutError, match="at most 80 bytes"):
        seal(sealer, step())


def test_each_record_acknowledges_what_its_sender_has_received():
    sealer, opener = Sealer(UP), Opener(UP, LIMITS)
    for acknowledged in (0, 7, 2**32 - 1):
        (record,) = seal(sealer, step(), acknowledged)
        opener.open(record)
        assert opener.acknowledged == acknowledged


def test_a_large_frame_has_the_documented_bytes():
    sealed = seal(Sealer(UP), large())
    # The payload again, from the documented layout alone.
    text = b'{"a":{"dtype":"F32","shape":[524388],"data_offsets":[0,2097552]}}'
    text += b" " * (-(8 + len(text)) % 64)
    content = struct.pack("<Q", len(text)) + text + large().tensors["a"].numpy().tobytes()
    cipher = AESGCM(UP)
    expected = []
    for number, begin in enumerate(range(0, len(content), 2**20)):
        piece = content[begin : begin + 2**20]
        final = begin + len(piece) == len(content)
        head = header(Kind.AVERAGE, int(final), number, len(content))
        expected.append(head + cipher.encrypt(struct.pack(">IQ", 0, number), piece, head))
    assert [hashlib.sha256(record).digest() for record in sealed] == [
        hashlib.sha256(record).digest() for record in expected
    ]
