"""What odd clients with tickets send over a lane, for ``bench.hostile``.

They finish the handshake like anybody else, and then send records of their own making.
"""

import json
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import grpc
import torch

from split.lane.transport import METHOD, SERVICE, channel_options
from split.protocol.frames import Frame, Kind, Limits, Value
from split.protocol.handshake import ClientHandshake
from split.protocol.invitation import Invitation
from split.protocol.keys import known_suite
from split.protocol.payload import Outgoing
from split.protocol.records import LONGEST_RECORD, Sealer

_PATIENCE = 20.0


class Member:
    """Somebody with a ticket, who sends records as it likes.

    Args:
        invitation: to the block server.

    """

    def __init__(self, invitation: Invitation) -> None:
        address = invitation.address
        handshake = ClientHandshake(
            invitation.ticket,
            invitation.identity,
            invitation.server_key,
            known_suite(invitation.suite),
        )
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._messages.put(handshake.hello())
        self._channel = grpc.insecure_channel(address, options=channel_options(address))
        method = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self._call = method(iter(self._messages.get, None), timeout=_PATIENCE)
        try:
            finished, secrets = handshake.finish(next(self._call))
        except BaseException:
            self.close()
            raise
        self.send(finished)
        self.sealer = Sealer(secrets.up)

    def send(self, message: bytes) -> None:
        """Send a record, or what should be one."""
        self._messages.put(message)

    def wait(self) -> bytes:
        """Wait for a record."""
        return bytes(next(self._call))

    def until_ended(self) -> bool:
        """Wait until the server ends the lane; say whether it did."""
        with suppress(grpc.RpcError, StopIteration):
            while True:
                # Its last record is an error. What should follow is the other side's own last.
                if self.wait()[1] in (Kind.ERROR, Kind.CLOSE):
                    return True
        return self._call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED

    def close(self) -> None:
        """Go away without a word."""
        self._messages.put(None)
        self._call.cancel()
        self._channel.close()


def _sealed(sealer: Sealer, kind: Kind, content: bytes) -> bytes:
    return b"".join(sealer.seal(kind, 0, 0, memoryview(content)))


def join(sealer: Sealer, fields: dict[str, Value]) -> bytes:
    """Give a first frame."""
    frame = Frame(Kind.JOIN, fields=fields)
    return _sealed(sealer, Kind.JOIN, bytes(Outgoing(frame, _limits(1)).write()))


def hidden(
    sealer: Sealer, width: int, rows: int = 1, number: float = 0.0, counts: bool = False
) -> bytes:
    """Give hidden states of one number; NaN is put in where our own code would refuse it."""
    states = torch.zeros(rows, 4, width)
    tensors = {"hidden": states, "lengths": torch.full((rows,), 4)}
    fields: dict[str, Value] = {"side": "right"}
    if counts:
        fields |= {"targets": 1, "step_targets": 1, "micro_batches": 1}
    outgoing = Outgoing(Frame(Kind.HIDDEN, tensors=tensors, fields=fields), _limits(width))
    content = bytes(outgoing.write())
    # The data are at the end: hidden states first, row lengths (4 bytes each) last.
    begin = len(content) - 4 * rows - 4 * states.numel()
    content = content[:begin] + struct.pack("<f", number) + content[begin + 4 :]
    return _sealed(sealer, Kind.HIDDEN, content)


def _limits(width: int) -> Limits:
    return Limits(width, "float32", 10**9)


def _in_header(record: bytes, place: int, content: bytes) -> bytes:
    return record[:place] + content + record[place + len(content) :]


def _described(description: object) -> bytes:
    text = json.dumps(description).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(64)


_CHOICE: dict[str, Value] = {"model": "base"}
_OVERLAPPING = {
    name: {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]} for name in ("hidden", "lengths")
}
# What members of an evaluation send, given the width of hidden states.
MEMBERS: dict[str, Callable[[Sealer, int], list[bytes]]] = {
    "no record": lambda s, _: [b"x" * 100],
    "an empty message": lambda s, _: [b""],
    "a message of 1 MiB and more": lambda s, _: [bytes(LONGEST_RECORD + 1)],
    "an altered record": lambda s, _: [join(s, _CHOICE)[:-1] + b"x"],
    "a repeated record": lambda s, _: [join(s, _CHOICE)] * 2,
    "a record left out": lambda s, _: [join(s, _CHOICE), join(s, _CHOICE)][1:],
    "an unknown kind": lambda s, _: [_in_header(join(s, _CHOICE), 1, b"\xc8")],
    "a length of 2⁶⁰": lambda s, _: [_in_header(join(s, _CHOICE), 24, struct.pack(">Q", 2**60))],
    "no description": lambda s, _: [_sealed(s, Kind.JOIN, b"\xff" * 200)],
    "a description of nonsense": lambda s, _: [_sealed(s, Kind.JOIN, _described([1, {}]))],
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
