"""The process that floods a block server with hostile peers, for ``bench.hostile``."""

import itertools
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc

from bench.hostile_members import MEMBERS, Member
from bench.hostile_strangers import STRANGERS
from split.protocol.invitation import Invitation

_OPEN_AT_ONCE = 150  # connections of strangers
_PATIENCE = 20.0


@dataclass(frozen=True)
class Attack:
    """What a flood is made of.

    Attributes:
        address: of the block server.
        hello: an honest client's first message, as it was seen on the network.
        invitations: of members; each sends something odd once.
        strangers: connections without a ticket.
        seconds: over which all this is spread.

    """

    address: str
    hello: bytes
    invitations: Sequence[Invitation]
    strangers: int
    seconds: float


def flood(link: Connection, width: int) -> None:
    """Make an attack per message; the answer says how many of each kind the server ended."""
    while True:
        attack = link.recv()
        assert isinstance(attack, Attack)
        made: Counter[str] = Counter()
        ended: Counter[str] = Counter()
        work = _interleaved(
            _strangers(attack, made, ended), _members(attack, width, made, ended), attack
        )
        started, count = time.monotonic(), attack.strangers + len(attack.invitations)
        for number, _ in enumerate(work):
            time.sleep(max(0.0, started + attack.seconds * number / count - time.monotonic()))
        link.send((made, ended, time.monotonic() - started))


def _interleaved(
    strangers: Iterator[None], members: Iterator[None], attack: Attack
) -> Iterator[None]:
    """Let members come evenly among strangers."""
    among = max(1, attack.strangers // max(1, len(attack.invitations)))
    for number, _ in enumerate(strangers):
        yield
        if number % among == 0:
            yield next(members, None)
    yield from members


def _strangers(attack: Attack, made: Counter[str], ended: Counter[str]) -> Iterator[None]:
    host, port = attack.address.split(":")
    randomness = random.Random(0)
    kinds = itertools.cycle(STRANGERS.items())
    connections: deque[tuple[str, socket.socket]] = deque()
    for number in range(attack.strangers + _OPEN_AT_ONCE):
        if number < attack.strangers:
            name, write = next(kinds)
            made[name] += 1
            connection = socket.create_connection((host, int(port)), timeout=_PATIENCE)
            connections.append((name, connection))
            with suppress(OSError):  # it may be closed already
                connection.sendall(write(attack.hello, randomness))
            yield
        if connections and (number >= attack.strangers or len(connections) > _OPEN_AT_ONCE):
            name, connection = connections.popleft()
            with closing(connection):
                ended[name] += _has_ended(connection, wait=number >= attack.strangers)


def _has_ended(connection: socket.socket, wait: bool) -> bool:
    """Say whether the server has closed a connection, or refused its stream."""
    connection.settimeout(_PATIENCE if wait else 0.0)
    found = b""
    try:
        while content := connection.recv(2**16):
            found += content
            if b"grpc-status" in found:
                return True
        return True
    except BlockingIOError:
        return False
    except TimeoutError:
        return False
    except OSError:
        return True


def _members(attack: Attack, width: int, made: Counter[str], ended: Counter[str]) -> Iterator[None]:
    kinds = itertools.cycle(MEMBERS.items())
    for invitation in attack.invitations:
        name, write = next(kinds)
        made[name] += 1
        yield
        try:
            member = Member(invitation)
        except grpc.RpcError:  # no room at the moment
            made[name] -= 1
            made["members who found no place"] += 1
            continue
        with closing(member):
            for message in write(member.sealer, width):
                member.send(message)
            ended[name] += member.until_ended()
