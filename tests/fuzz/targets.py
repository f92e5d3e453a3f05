"""One function for each parser of untrusted bytes, which it must accept or refuse.

A target takes any bytes and returns whether they were accepted. It returns False if the documented
error was raised. Any other exception is a fault.
"""

import json
import os
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)

from chambers.errors import CommandError
from chambers.models import read_invitation
from chambers.sheet.blinding import Key, KeyRow
from chambers.sheet.results import read_sheet
from client_app.audit import AuditLog, describe_reply
from federation.authentication import (
    INSTRUCTION,
    AuthenticationError,
    SignedInstruction,
    Statement,
)
from federation.messages import (
    ARRAYS,
    CONFIG,
    Instruction,
    InstructionError,
    answers_of,
    config_of,
    from_arrays,
    withheld_of,
)
from federation.run_config import ConfigError, parse_run_config
from finetuning.data.formats import DataError
from finetuning.data.rows import read_rows
from finetuning.errors import BaseModelError, printable
from finetuning.model.gguf_file import read_header
from split.protocol.errors import FrameError, HandshakeError, ProtocolError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.handshake import ClientHandshake, ServerHandshake
from split.protocol.keys import ServerKeys, authenticate, derive, key_identifier, wrap
from split.protocol.payload import Outgoing
from split.protocol.records import HEADER_BYTES, TAG_BYTES, Opener
from split.protocol.tickets import Identity, TicketBook
from split.protocol.training import HeadOutput, RoundLimits, RoundPlan, TrainingRound
from strategies.refusals import agreed, reason_to_refuse, reason_to_refuse_registration
from tests.split.payloads import unpack

HIDDEN = 4
SUITE = "ml-kem-768-x25519"
KEY = bytes(32)
COURT = Identity("run", 7, "court")
WIRES = ("float32", "bfloat16", "int8")
STATEMENT = Statement(
    run=1,
    kind="train",
    node=1,
    nonce="0" * 32,
    time=0.0,
    expires=1.0,
    secret="0" * 64,
    digest="0" * 64,
    config="0" * 64,
)
# Placeholders in a message for the ticket's identifier, and for the wrapped secret and its key.
TICKET, WRAPPED = b"<TICKET>", b"<WRAPPED>"


def limits(wire):
    return Limits(HIDDEN, wire, 32, average_bytes=2**16)


@cache
def server_keys():
    return ServerKeys(SUITE)


@contextmanager
def file_with(data, suffix):
    file = Path(tempfile.gettempdir(), f"chambers-fuzz-{os.getpid()}{suffix}")
    try:
        file.write_bytes(data)
        yield file
    finally:
        file.unlink()


def parsed(data):
    """Parse the input of a target that takes a value as JSON; return None on failure."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def hello(data):
    """Read an M1 from a peer that has the ticket's secret."""
    keys, book = server_keys(), TicketBook()
    ticket = book.issue(COURT, 60)
    body = data.replace(TICKET, ticket.identifier)
    before, marker, after = body.partition(WRAPPED)
    if marker:  # wrapping binds the secret to the preceding bytes
        before += key_identifier(SUITE, keys.public)
        body = before + wrap(SUITE, keys.public, bytes(32), before) + after
    key = derive(secret=ticket.secret, label=b"hello", context=b"", length=32)
    server = ServerHandshake(keys, book)
    try:
        assert server.read(body + authenticate(key, body)) == COURT
        server.answer()
    except HandshakeError:
        return False
    return True


def answer(data):
    """Read an M2 and an M3 from a peer without secrets, which must be refused."""
    keys, book = server_keys(), TicketBook()
    ticket = book.issue(COURT, 60)
    client, server = ClientHandshake(ticket, COURT, keys.public, SUITE), ServerHandshake(keys, book)
    server.read(client.hello())
    right = server.answer()
    for end in (client.finish, server.accept):
        try:
            end(data)
        except HandshakeError:
            continue
        raise AssertionError("arbitrary bytes have finished a handshake")
    finished, _ = client.finish(right)  # refused messages change nothing
    server.accept(finished)
    return False


def records(data):
    """Read a sender's records, sealed with the key; each is a length, a header and content."""
    opener, cipher, number = Opener(KEY, limits("float32")), AESGCM(KEY), 0
    frames = 0
    while len(data) > HEADER_BYTES:
        size, data = int.from_bytes(data[:2]), data[2:]
        header, content = data[:HEADER_BYTES], data[HEADER_BYTES : HEADER_BYTES + size]
        data = data[HEADER_BYTES + size :]
        sealed = header + cipher.encrypt(number.to_bytes(12, "big"), content, header)
        number += 1
        assert len(sealed) == len(header) + len(content) + TAG_BYTES
        try:
            frames += opener.open(sealed) is not None
        except FrameError:
            return False
    return frames > 0


def payload(data):
    """Read a frame's payload, after one byte for its kind and one for the lane's wire type."""
    if len(data) < 3 or data[0] not in Kind.__members__.values():
        return False
    kind, agreed_on = Kind(data[0]), limits(WIRES[data[1] % len(WIRES)])
    try:
        frame = unpack(data[2:], kind, agreed_on)
    except FrameError:
        return False
    # A frame that was read can be sent, and arrives unchanged.
    again = unpack(bytes(Outgoing(frame, agreed_on).write()), kind, agreed_on)
    assert frame.fields == again.fields
    for name, tensor in frame.tensors.items():
        assert tensor.shape == again.tensors[name].shape
    return True


def training(data):
    """Read a round's frames, each [kind, step, micro-batch, [rows, columns], fields]."""
    largest = RoundPlan(steps=2, first_step=2, total_steps=6, seed=0)
    bounds = RoundLimits(
        window=2,
        activation_budget=64,
        lanes=1,
        columns_before=0,
        micro_batches=2,
        rows=4,
    )
    round_, first, ended = TrainingRound(largest, bounds), True, False
    for item in parsed(data) or []:
        try:
            frame = sent(*item)
        except (TypeError, ValueError, RuntimeError, FrameError):
            return False  # a lane has no such frame
        try:
            event = round_.join(frame) if first else round_.receive(frame)
        except ProtocolError:
            return False
        first, ended = False, not first and event is None
        round_.answered += isinstance(event, HeadOutput)
        assert round_.returned <= round_.answered
        assert round_.answered - round_.returned <= round_.credits
    return ended


def sent(kind, step, micro_batch, shape, fields):
    """Return a frame as the other end receives it."""
    import torch

    kind, tensors = Kind(kind), {}
    if kind in (Kind.HIDDEN, Kind.GRADIENT):
        rows, columns = (min(9, int(n)) for n in shape)
        tensors["hidden" if kind is Kind.HIDDEN else "gradient"] = torch.ones(rows, columns, HIDDEN)
        if kind is Kind.HIDDEN:
            tensors["lengths"] = torch.full((rows,), columns, dtype=torch.int32)
    frame = Frame(kind, int(step), int(micro_batch), tensors, dict(fields))
    agreed_on = limits("float32")
    arrived = unpack(bytes(Outgoing(frame, agreed_on).write()), kind, agreed_on)
    return Frame(kind, frame.step, frame.micro_batch, arrived.tensors, arrived.fields)


def invitation(data):
    """Read an invitation file."""
    with file_with(data, ".json") as file:
        try:
            found = read_invitation(file)
        except CommandError:
            return False
    assert found.lane.ticket.secret == found.secret
    return True


def message_of(value):
    """Return a Flower message with these records, or None if Flower has no such message."""
    try:
        metadata = Metadata(
            run_id=1,
            message_id="",
            src_node_id=1,
            dst_node_id=1,
            reply_to_message_id="",
            group_id="",
            created_at=0.0,
            ttl=1.0,
            message_type="train",
        )
        if "error" in value:
            return Message(Error(*value["error"]), metadata=metadata)
        content = RecordDict()
        for name, record in value.get("configs", {}).items():
            content[name] = ConfigRecord(record)
        for name, record in value.get("metrics", {}).items():
            content[name] = MetricRecord(record)
        for name, record in value.get("arrays", {}).items():
            arrays = {
                key: Array(dtype, tuple(shape), stype, data.encode("latin-1"))
                for key, (dtype, shape, stype, data) in record.items()
            }
            content[name] = ArrayRecord(arrays)
        return Message(content, metadata=metadata)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def instruction(data):
    """Read the instruction in a message from the server."""
    message = message_of({"configs": {CONFIG: parsed(data)}})
    try:
        found = Instruction.of(message) if message is not None else None
    except InstructionError:
        return False
    if found is None:
        return False
    assert Instruction.of(message_of({"configs": {CONFIG: dict(found.to_record())}})) == found
    return True


def signed(data):
    """Read a signed instruction's statement, whose signature is checked afterwards."""
    record = {"statement": data, "signature": b"", "records": b""}
    try:
        message = message_of({"configs": {INSTRUCTION: record}})
        return SignedInstruction.of(message.content) is not None
    except AuthenticationError:
        return False


def content(data):
    """Read the records of a message with a valid signature or authentication."""
    try:
        SignedInstruction(b"", STATEMENT, b"", data, {}).content()
    except AuthenticationError:
        return False
    return True


def reply(data):
    """Read a client's reply to a query and to a train message."""
    message = message_of(parsed(data))
    if message is None:
        return False
    fingerprint = {"embedding": "digest", "block": ""}
    config = config_of(message)
    whole = fingerprint | agreed([config], fingerprint)
    name = str(config.get("name", ""))
    joins = reason_to_refuse_registration(
        message,
        name,
        name_only=False,
        taken={"clinic"},
        assigned="",
        fingerprint=whole,
    )
    reference = ArrayRecord({"weight": Array(np.zeros((2, 2), np.float32))})
    why = reason_to_refuse(
        message, name="court", examples=3, base="base", reference=reference, answers=1
    )
    for reason in (joins, why, withheld_of(message)):
        assert reason is None or printable(reason)
    if why is None:
        assert from_arrays(message.content.array_records[ARRAYS])["weight"].isfinite().all()
        assert len(answers_of(message)) <= 3
        json.dumps(describe_reply(message, message), allow_nan=False)
    return None in (joins, why)


def run_config(data):
    """Read a run config: scalars keyed by name, as Flower passes them."""
    values = parsed(data)
    if not isinstance(values, dict):
        return False
    scalars = {k: v for k, v in values.items() if isinstance(v, str | int | float | bool)}
    try:
        config = parse_run_config(scalars)
    except ConfigError:
        return False
    assert parse_run_config(config.flat()) == config
    return True


def rows(data):
    """Read a file of rows, after one byte that chooses its format."""
    if not data:
        return False
    with file_with(data[1:], (".jsonl", ".json", ".csv")[data[0] % 3]) as file:
        try:
            found = read_rows(file)
        except DataError:
            return False
    for row in found:
        assert any(turn["role"] == "assistant" for turn in row.messages)
        "".join(turn["content"] for turn in row.messages).encode()
    return True


def gguf(data):
    """Read a GGUF file."""
    with file_with(data, ".gguf") as file:
        try:
            header = read_header(file)
        except BaseModelError:
            return False
    assert all(count >= 0 for count in header.weights.values())
    return True


def audit(data):
    """Read an audit log, in which no line may raise an error, so that new lines can be written."""
    with file_with(data, ".jsonl") as file:
        lines = list(AuditLog(file).lines())
    assert all(isinstance(line, dict) for line in lines)
    return any(lines)


def sheet(data):
    """Read a sheet that an annotator has filled in."""
    rows = {
        name: KeyRow(annotator=1, number=1, question="question", model=name)
        for name in ("bcd", "fgh")
    }
    key = Key(seed=0, models=["a", "b"], rows=rows)
    with file_with(data, ".csv") as file:
        try:
            number, scores = read_sheet(file, key)
        except CommandError:
            return False
    assert number == 1
    assert scores.keys() == key.rows.keys()
    return True


TARGETS = {
    target.__name__: target
    for target in (
        hello,
        answer,
        records,
        payload,
        training,
        invitation,
        signed,
        content,
        instruction,
        reply,
        run_config,
        rows,
        gguf,
        audit,
        sheet,
    )
}
