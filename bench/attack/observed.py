"""A client's hidden states as observed by the server or by a peer on the network.

Chambers' own code computes the head, adds the noise, converts to the wire type and encrypts.
The server sees hidden states after the conversion; a peer on the network sees encrypted records.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from split.client.remote_body import add_noise
from split.model.part import Part
from split.protocol.frames import Frame, Kind, Limits, Padding, WireType
from split.protocol.payload import Outgoing, describe
from split.protocol.records import HEADER_BYTES, TAG_BYTES, Opener, Sealer

Observed = Literal["hidden states", "encrypted records", "nothing"]
_ROWS_AT_ONCE = 16


@torch.no_grad()
def compute_head_outputs(head: Part, rows: Sequence[Tensor]) -> list[Tensor]:
    """Compute a head's hidden states, (tokens, hidden) of each row of tokens."""
    head.train(False)
    outputs = []
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        group = rows[first : first + _ROWS_AT_ONCE]
        lengths = torch.tensor([len(row) for row in group])
        hidden = head(pad_sequence(list(group), batch_first=True), Padding("right", lengths))
        outputs += [row[:length] for row, length in zip(hidden, lengths, strict=True)]
    return outputs


def transmit(hidden: Sequence[Tensor], wire: WireType, noise: float = 0.0) -> list[Tensor]:
    """Return hidden states as the server decrypts them; noise is added before sending."""
    received = []
    for tokens in hidden:
        sent = add_noise(tokens[None], noise) if noise else tokens[None]
        frame, limits = _frame(sent, wire)
        key = os.urandom(32)
        opener = Opener(key, limits)
        for record in _seal(frame, limits, key):
            complete = opener.open(record)
        assert complete is not None  # the last record completes the frame
        received.append(complete.tensors["hidden"][0].float())
    return received


def encrypt(hidden: Sequence[Tensor], wire: WireType) -> list[Tensor]:
    """Return the encrypted bytes of each text as numbers in -1..1, (tokens, bytes of a token).

    A peer on the network can locate a token's bytes, because the format determines their place in a
    frame. Here, every frame has a new key; in a lane, every stream has one.
    """
    seen = []
    for tokens in hidden:
        frame, limits = _frame(tokens[None], wire)
        content = b"".join(
            record[HEADER_BYTES:-TAG_BYTES] for record in _seal(frame, limits, os.urandom(32))
        )
        _, description = describe(frame, limits)
        entry = next(entry for entry in description.entries if entry.name == "hidden")
        begin, end = description.start + entry.begin, description.start + entry.end
        numbers = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.uint8)
        seen.append(numbers.view(len(tokens), -1).float() / 127.5 - 1)
    return seen


def _frame(hidden: Tensor, wire: WireType) -> tuple[Frame, Limits]:
    rows, columns, width = hidden.shape
    limits = Limits(hidden=width, wire_dtype=wire, max_tokens=rows * columns)
    frame = Frame(
        kind=Kind.HIDDEN,
        step=0,
        micro_batch=0,
        tensors={"hidden": hidden, "lengths": torch.full((rows,), columns)},
        fields={"side": "right"},
    )
    return frame, limits


def _seal(frame: Frame, limits: Limits, key: bytes) -> Iterator[bytes]:
    content = Outgoing(frame, limits).write()
    return Sealer(key).seal(frame, acknowledged=0, content=content)
