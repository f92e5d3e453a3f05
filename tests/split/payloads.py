"""Convert frames to payloads and back, for tests."""

import torch

from split.protocol import payload
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.payload import Outgoing, read_description

HIDDEN = 256


def limits(wire="float32", **more):
    return Limits(HIDDEN, wire, 512, **({"average_bytes": 2**24} | more))


def pack(frame, agreed):
    return bytes(Outgoing(frame, agreed).write())


def unpack(content, kind, agreed):
    buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    description = read_description(buffer.numpy().data, len(content), kind, agreed)
    return payload.read(description, buffer, kind, 1, 2)


def round_trip(frame, agreed):
    return unpack(pack(frame, agreed), frame.kind, agreed)


def hidden_frame(tensor, **fields):
    lengths = torch.tensor([tensor.shape[1], 1], dtype=torch.int32)
    return Frame(
        Kind.HIDDEN, 1, 2, {"hidden": tensor, "lengths": lengths}, {"side": "left"} | fields
    )


def tokens(seed=0, rows=2, columns=64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, HIDDEN, generator=generator) * scale
