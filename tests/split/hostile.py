"""Peers that attack a block server: outsiders on its port, and members with a valid ticket."""

import json
import pickle
import random
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue

import grpc
import torch
from safetensors.torch import save

from split.lane.transport import METHOD, SERVICE, channel_options
from split.protocol.frames import Frame, Kind, Value
from split.protocol.handshake import ClientHandshake
from split.protocol.keys import known_suite
from split.protocol.records import MAX_RECORD_BYTES, Sealer
from split.protocol.tickets import Invitation, Ticket

_SECONDS = 60.0  # for the server to end a peer
# HTTP/2, RFC 9113.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_LARGEST_HTTP_FRAME = 2**14
# Offsets in a record's header, docs/wire.md.
_KIND, _TOTAL = 1, 24


def outsider(address: str, content: bytes) -> socket.socket:
    """Connect without a ticket, and send ``content``."""
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=_SECONDS)
    with suppress(OSError):  # the server may have closed it already
        connection.sendall(content)
    return connection


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _opening(*streams: int) -> bytes:
    """Return bytes that open a connection, and a lane in each stream."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{METHOD}",
        ":authority": "server",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # Each as a literal without indexing.
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    lanes = [_frame(_HEADERS, 4, stream, headers) for stream in streams]
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + b"".join(lanes)


def _message(content: bytes) -> bytes:
    """Return a gRPC message in the first stream."""
    framed = struct.pack(">BI", 0, len(content)) + content
    pieces = range(0, len(framed), _LARGEST_HTTP_FRAME)
    return b"".join(_frame(_DATA, 0, 1, framed[i : i + _LARGEST_HTTP_FRAME]) for i in pieces)


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _handshake(invitation: Invitation, ticket: Ticket | None = None) -> ClientHandshake:
    suite = known_suite(invitation.suite)
    ticket = ticket or invitation.ticket
    return ClientHandshake(ticket, invitation.identity, invitation.server_key, suite)


def recorded(invitation: Invitation) -> bytes:
    """Return an honest client's first message, as an eavesdropper records it."""
    return _handshake(invitation).hello()


def _unknown_ticket(invitation: Invitation) -> bytes:
    return _handshake(invitation, Ticket(random.randbytes(16), random.randbytes(32))).hello()


# What outsiders send, given an honest client's invitation and its recorded first message. Of the
# invitation they use what an eavesdropper knows.
OUTSIDERS: dict[str, Callable[[Invitation, bytes], bytes]] = {
    "nothing": lambda _, hello: b"",
    "noise": lambda _, hello: random.randbytes(random.randrange(1, 20_000)),
    "HTTP/1": lambda _, hello: b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
    "HTTP/2 without frames": lambda _, hello: _PREFACE,
    "HTTP/2 without streams": lambda _, hello: _opening(),
    "noise in HTTP/2": lambda _, hello: _opening() + random.randbytes(500),
    "a silent stream": lambda _, hello: _opening(1),
    "more streams than one": lambda _, hello: _opening(*range(1, 40, 2)),
    "streams that are reset": lambda _, hello: (
        _opening(1) + _frame(_RESET, 0, 1, b"\0\0\0\x08") + _opening(3)[len(_PREFACE) :]
    ),
    "half a message": lambda _, hello: _opening(1) + _message(hello)[: random.randrange(1, 1000)],
    "two gigabytes announced": lambda _, hello: (
        _opening(1) + _frame(_DATA, 0, 1, b"\0\x7f\xff\xff\xff" + bytes(1000))
    ),
    "an oversized message": lambda _, hello: _opening(1) + _message(bytes(MAX_RECORD_BYTES + 1)),
    "no first message": lambda _, hello: _opening(1) + _message(random.randbytes(1300)),
    "an unknown ticket": lambda invitation, _: _opening(1) + _message(_unknown_ticket(invitation)),
    "a wrong MAC": lambda _, hello: _opening(1) + _message(_flipped(hello)),
    "an honest client's first message": lambda _, hello: _opening(1) + _message(hello),
}


class Member:
    """A client with a valid ticket that completes the handshake and then sends arbitrary records.

    Args:
        invitation: Invitation of the client.
        ticket: Ticket to use instead of the invitation's.
        acknowledged: Number of frames that the client claims to have received.

    Attributes:
        sealer: Encrypts the member's records.
        resumption: Ticket for the lane's next stream.

    """

    def __init__(
        self, invitation: Invitation, ticket: Ticket | None = None, acknowledged: int = 0
    ) -> None:
        handshake = _handshake(invitation, ticket)
        address = invitation.address
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._messages.put(handshake.hello())
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = method(iter(self._messages.get, None), timeout=_SECONDS)
        try:
            finished, secrets = handshake.finish(next(self._call))
        except BaseException:
            self.close()
            raise
        self.sealer, self.resumption = Sealer(secrets.up), secrets.resumption
        self.send(finished)
        confirmation = _payload({}, {})
        self.send(_sealed(self.sealer, Kind.CONFIRM, confirmation, acknowledged=acknowledged))

    def send(self, record: bytes) -> None:
        self._messages.put(record)

    def wait_for(self, *kinds: Kind) -> Kind | None:
        """Return the first of the kinds to arrive; None if the stream ends before that."""
        with suppress(grpc.RpcError, StopIteration):
            while (kind := next(self._call)[_KIND]) not in kinds:
                pass
            return Kind(kind)
        return None

    def is_ended(self) -> bool:
        """Return whether the server ends the lane."""
        if self.wait_for(Kind.ERROR, Kind.CLOSE):
            return True
        return self._call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED

    def close(self) -> None:
        """Cancel the stream."""
        self._messages.put(None)
        self._call.cancel()
        self._channel.close()


def _sealed(
    sealer: Sealer, kind: Kind, content: bytes, step: int = 0, acknowledged: int = 0
) -> bytes:
    """Seal a frame of one record, which by default acknowledges nothing."""
    return b"".join(sealer.seal(Frame(kind, step), acknowledged, memoryview(content)))


def _payload(tensors: dict[str, torch.Tensor], fields: Mapping[str, Value]) -> bytes:
    # The library writes invalid JSON for empty metadata without tensors.
    return save(tensors, {name: json.dumps(value) for name, value in fields.items()} or None)


def join(sealer: Sealer, fields: Mapping[str, Value]) -> bytes:
    """Return the JOIN frame, the first frame of a session."""
    return _sealed(sealer, Kind.JOIN, _payload({}, fields))


def hidden(
    sealer: Sealer,
    width: int,
    rows: int = 1,
    columns: int = 4,
    step: int = 0,
    number: float = 0.0,
    **counts: Value,
) -> bytes:
    """Return a frame of hidden states, (rows, columns, width), whose first value is ``number``."""
    states = torch.zeros(rows, columns, width)
    states[0, 0, 0] = number
    tensors = {"hidden": states, "lengths": torch.full((rows,), columns, dtype=torch.int32)}
    return _sealed(sealer, Kind.HIDDEN, _payload(tensors, {"side": "right"} | counts), step)


def gradient(
    sealer: Sealer,
    width: int,
    rows: int = 1,
    columns: int = 4,
    step: int = 0,
    number: float = 0.0,
) -> bytes:
    """Return a frame of gradients, (rows, columns, width), all equal to ``number``."""
    tensors = {"gradient": torch.full((rows, columns, width), number)}
    return _sealed(sealer, Kind.GRADIENT, _payload(tensors, {}), step)


def end_of_step(
    sealer: Sealer, step: int = 0, acknowledged: int = 0, squared_norm: float = 0.0
) -> bytes:
    """Return the last frame of a step."""
    content = _payload({}, {"squared_norm": squared_norm})
    return _sealed(sealer, Kind.STEP, content, step, acknowledged)


def empty(sealer: Sealer, kind: Kind) -> bytes:
    """Return a frame without content."""
    return _sealed(sealer, kind, _payload({}, {}))


def _altered(record: bytes, offset: int, content: bytes) -> bytes:
    return record[:offset] + content + record[offset + len(content) :]


def _described(description: object) -> bytes:
    text = json.dumps(description).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(64)


_CHOICE = {"model": "base"}
_OVERLAPPING = {
    name: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for name in ("hidden", "lengths")
}
# Cuts to the server, after which it waits for another stream.
CUTS = {
    "no record",
    "an empty message",
    "a message of more than 1 MiB",
    "an altered record",
    "a repeated record",
    "a record left out",
    "an unknown kind",
    "a length of 2⁶⁰",
}
# What members of an evaluation send, given the width of hidden states.
MEMBERS: dict[str, Callable[[Sealer, int], list[bytes]]] = {
    "no record": lambda s, _: [b"x" * 100],
    "an empty message": lambda s, _: [b""],
    "a message of more than 1 MiB": lambda s, _: [bytes(MAX_RECORD_BYTES + 1)],
    "an altered record": lambda s, _: [_flipped(join(s, _CHOICE))],
    "a repeated record": lambda s, _: [join(s, _CHOICE)] * 2,
    "a record left out": lambda s, _: [join(s, _CHOICE), join(s, _CHOICE)][1:],
    "an unknown kind": lambda s, _: [_altered(join(s, _CHOICE), _KIND, b"\xc8")],
    "a length of 2⁶⁰": lambda s, _: [_altered(join(s, _CHOICE), _TOTAL, struct.pack(">Q", 2**60))],
    "no description": lambda s, _: [_sealed(s, Kind.JOIN, b"\xff" * 200)],
    "a malformed description": lambda s, _: [_sealed(s, Kind.JOIN, _described([1, {}]))],
    "tensors that overlap": lambda s, _: [_sealed(s, Kind.HIDDEN, _described(_OVERLAPPING))],
    "a pickle": lambda s, _: [_sealed(s, Kind.AVERAGE, pickle.dumps({"a": 1}) * 20)],
    "NaN": lambda s, w: [join(s, _CHOICE), hidden(s, w, number=float("nan"))],
    "infinite numbers": lambda s, w: [join(s, _CHOICE), hidden(s, w, number=float("inf"))],
    "another width": lambda s, w: [join(s, _CHOICE), hidden(s, w + 1)],
    "too many tokens": lambda s, w: [join(s, _CHOICE), hidden(s, w, rows=1000)],
    "no choice": lambda s, w: [hidden(s, w)],
    "an unknown model": lambda s, _: [join(s, {"model": "another"})],
    "more than its credits": lambda s, w: [
        join(s, _CHOICE),
        *(hidden(s, w, rows=8) for _ in range(200)),
    ],
}
