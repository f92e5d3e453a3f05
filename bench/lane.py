"""Throughput and CPU time of a lane, beside AES-256-GCM over a plain socket.

    python -m bench.lane [--pairs 9]

A client sends hidden states of 512 × 2048 in bfloat16, four at once, and the server sends each
back. Both are processes on a core each; sides take turns. *Empty* is a lane whose cipher only
copies, so that it shows what everything but encryption takes.
"""

import os
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack
from itertools import repeat
from threading import Thread

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.harness import WARM_UP, BoundProcess, Side, command, make_table, show
from bench.job import LIFETIME
from split import framing
from split.lane.dialling import open_lane
from split.lane.lane import Lane
from split.lane.listening import LaneServer
from split.protocol import records
from split.protocol.errors import LaneError
from split.protocol.frames import Kind, Limits
from split.protocol.keys import KeyExchange, ServerKeys
from split.protocol.records import RECORD_BYTES, TAG_BYTES
from split.protocol.tickets import Identity, Invitation

_TOKENS, _HIDDEN, _AT_ONCE, _FRAMES = 512, 2048, 4, 100
_LIMITS = Limits(_HIDDEN, "bfloat16", _TOKENS, window=_AT_ONCE)
_SUITE: KeyExchange = "ml-kem-768-x25519"
_KEY, _NONCE = bytes(32), bytes(12)
_MB = 2 * _FRAMES * _TOKENS * _HIDDEN * 2 / 1e6  # of a turn, in both directions


class EmptyCipher:
    """A stand-in for AES-GCM that copies instead."""

    def __init__(self, _: bytes) -> None:
        pass

    def encrypt_into(self, _: bytes, data: memoryview, __: bytes, buffer: memoryview) -> None:
        """Copy the data, and leave the tag as it is."""
        buffer[: len(data)] = data

    def decrypt_into(self, _: bytes, data: memoryview, __: memoryview, buffer: memoryview) -> None:
        """Copy the data without the tag."""
        buffer[:] = data[: len(buffer)]


def _choose_cipher(is_empty: bool) -> None:
    if is_empty:
        setattr(records, "AESGCM", EmptyCipher)  # noqa: B010 - mypy allows no other class


def _hidden() -> torch.Tensor:
    return torch.randn(1, _TOKENS, _HIDDEN, generator=torch.Generator().manual_seed(0))


class LaneEcho:
    """A block server's end, which sends each frame back."""

    def __init__(self, is_empty: bool) -> None:
        _choose_cipher(is_empty)
        self._keys = ServerKeys(_SUITE)
        self._server = LaneServer("127.0.0.1:0", self._keys, _LIMITS, self._serve)
        self._server.start()

    def invite(self) -> Invitation:
        """Return an invitation to a lane."""
        identity = Identity("run", 1, "client")
        ticket = self._server.issue(identity, LIFETIME)
        return Invitation(self._server.address, _SUITE, self._keys.public, identity, ticket)

    @staticmethod
    def _serve(lane: Lane) -> None:
        try:
            while True:
                frame = lane.receive(LIFETIME)
                lane.send(frame.kind, frame.step, frame.micro_batch, frame.tensors)
        except LaneError:  # the client has closed the lane
            return


class LaneClient:
    """A client's end."""

    def __init__(self, is_empty: bool, invitation: Invitation) -> None:
        _choose_cipher(is_empty)
        until = time.monotonic() + LIFETIME
        self._lane = open_lane(invitation, _LIMITS, until, resume_timeout=1.0)
        self._states = _hidden().bfloat16()

    def turn(self) -> None:
        """Exchange all frames."""
        for number in range(_FRAMES + _AT_ONCE):
            if number >= _AT_ONCE:
                self._lane.receive(LIFETIME)
            if number < _FRAMES:
                self._lane.send(Kind.HIDDEN, 0, number, {"hidden": self._states})


class SocketEcho:
    """The other end of a plain socket."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        Thread(target=self._serve, daemon=True).start()

    def port(self) -> int:
        """Return the port on which it listens."""
        return int(self._listener.getsockname()[1])

    def _serve(self) -> None:
        stream, _ = self._listener.accept()
        cipher = AESGCM(_KEY)
        while True:
            record = framing.receive(stream)
            content = memoryview(bytearray(len(record) - TAG_BYTES))
            cipher.decrypt_into(_NONCE, record, None, content)
            framing.send(stream, cipher.encrypt(_NONCE, content, None))


class SocketClient:
    """A client's end of a plain socket, which sends records of the same size."""

    def __init__(self, port: int) -> None:
        self._stream = socket.create_connection(("127.0.0.1", port))
        self._cipher = AESGCM(_KEY)
        self._states = _hidden().bfloat16()

    def turn(self) -> None:
        """Exchange all frames."""
        content = self._states.view(torch.uint8).numpy().data.cast("B")
        pieces = [content[at : at + RECORD_BYTES] for at in range(0, len(content), RECORD_BYTES)]
        buffer = memoryview(bytearray(len(content)))
        for number in range(_FRAMES + _AT_ONCE):
            for at in range(0, len(content) if number >= _AT_ONCE else 0, RECORD_BYTES):
                record = framing.receive(self._stream)
                self._cipher.decrypt_into(_NONCE, record, None, buffer[at : at + RECORD_BYTES])
            for piece in pieces if number < _FRAMES else ():
                framing.send(self._stream, self._cipher.encrypt(_NONCE, piece, None))


class Ends(Side):
    """A side: a client and a server, in a process each."""

    def __init__(self, name: str, server: BoundProcess, client: BoundProcess, turn: object) -> None:
        super().__init__(name, [client.pid, server.pid])
        self._client, self._turn = client, turn

    def turn(self) -> None:
        """Measure a turn."""
        self.start()
        self._client.ask(self._turn)  # type: ignore[arg-type]
        self.stop()

    def row(self) -> list[str]:
        """Return MB/s, and the CPU milliseconds per MB of the client and of the server."""
        seconds, _, _ = self.summary()
        turns = self.cpu[self.warm_up :]
        each = [1000 * sum(own) / len(turns) / _MB for own in zip(*turns, strict=True)]
        return [f"{_MB / seconds:.0f}", *(f"{value:.2f}" for value in each)]


def start_sides(stack: ExitStack, one: Collection[int], other: Collection[int]) -> list[Ends]:
    """Start both processes of each side."""
    sides = []
    for name, is_empty in {"lane": False, "lane, empty": True}.items():
        server = stack.enter_context(BoundProcess(other, LaneEcho, is_empty))
        invitation = server.ask(LaneEcho.invite)
        client = stack.enter_context(BoundProcess(one, LaneClient, is_empty, invitation))
        sides.append(Ends(name, server, client, LaneClient.turn))
    server = stack.enter_context(BoundProcess(other, SocketEcho))
    port = server.ask(SocketEcho.port)
    client = stack.enter_context(BoundProcess(one, SocketClient, port))
    sides.append(Ends("plain socket", server, client, SocketClient.turn))
    return sides


def main() -> None:
    """Measure, and print the table."""
    pairs = command(__doc__, pairs=9).parse_args().pairs
    cores = sorted(os.sched_getaffinity(0))
    table = make_table("", "MB/s", "client: CPU ms/MB", "server: CPU ms/MB")
    with ExitStack() as stack:
        sides = start_sides(stack, {cores[-1]}, {cores[0]})
        for _ in repeat(None, WARM_UP + pairs):
            for side in sides:
                side.turn()
    for side in sides:
        table.add_row(side.name, *side.row())
    show(f"{_FRAMES} frames of {_TOKENS} × {_HIDDEN} each way, {pairs} turns", table)


if __name__ == "__main__":
    main()
