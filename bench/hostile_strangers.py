"""What strangers send to a block server's port, for ``bench.hostile``.

They speak HTTP/2 by hand, which is quick.
"""

import random
import struct
from collections.abc import Callable

from split.lane.transport import METHOD, SERVICE
from split.protocol.records import LONGEST_RECORD

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_LARGEST_FRAME = 2**14


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def _opening(*streams: int) -> bytes:
    """Begin a connection, and a lane in each stream."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{METHOD}",
        ":authority": "server",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # Each as a literal that isn't put into a table.
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    lanes = [_frame(_HEADERS, 4, stream, headers) for stream in streams]
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + b"".join(lanes)


def _message(content: bytes) -> bytes:
    """Give a gRPC message in the first stream."""
    framed = struct.pack(">BI", 0, len(content)) + content
    pieces = range(0, len(framed), _LARGEST_FRAME)
    return b"".join(_frame(_DATA, 0, 1, framed[i : i + _LARGEST_FRAME]) for i in pieces)


def _changed(hello: bytes, place: int, randomness: random.Random) -> bytes:
    found = bytearray(hello)
    found[place] ^= randomness.randrange(1, 256)
    return bytes(found)


def _identifier(hello: bytes) -> int:
    """Find the ticket's identifier: run and node are before it, each with its length."""
    run = 11
    node = run + 1 + hello[run]
    return node + 1 + hello[node]


# What strangers send, from an honest client's first message and a source of random numbers.
STRANGERS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "nothing": lambda _, r: b"",
    "noise": lambda _, r: r.randbytes(r.randrange(1, 20_000)),
    "HTTP/1": lambda _, r: b"GET / HTTP/1.1\r\nHost: server\r\n\r\n",
    "HTTP/2 without frames": lambda _, r: _PREFACE,
    "HTTP/2 without streams": lambda _, r: _opening(),
    "noise in HTTP/2": lambda _, r: _opening() + r.randbytes(500),
    "a silent stream": lambda _, r: _opening(1),
    "more streams than one": lambda _, r: _opening(*range(1, 40, 2)),
    "streams that are reset": lambda _, r: (
        _opening(1) + _frame(_RESET, 0, 1, b"\0\0\0\x08") + _opening(3)[len(_PREFACE) :]
    ),
    "half a message": lambda hello, r: _opening(1) + _message(hello)[: r.randrange(1, 1000)],
    "two gigabytes to come": lambda _, r: (
        _opening(1) + _frame(_DATA, 0, 1, b"\0\x7f\xff\xff\xff" + bytes(1000))
    ),
    "an oversized message": lambda _, r: _opening(1) + _message(bytes(LONGEST_RECORD + 1)),
    "no first message": lambda _, r: _opening(1) + _message(r.randbytes(1300)),
    "an unknown ticket": lambda hello, r: (
        _opening(1) + _message(_changed(hello, _identifier(hello), r))
    ),
    "a wrong proof": lambda hello, r: _opening(1) + _message(_changed(hello, -1, r)),
    "an honest client's first message": lambda hello, r: _opening(1) + _message(hello),
}
