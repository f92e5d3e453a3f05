"""Create the test vectors for docs/wire.md with our code, from fixed secrets.

``python -m tests.split.wire.write_vectors > docs/wire-vectors.json`` replaces the vectors.
Only the wrapped secrets change each time, because wrapping draws random numbers.
"""

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import mlkem, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import MLKEM768X25519PrivateKey

from split.protocol import handshake
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.handshake import ClientHandshake, ServerHandshake
from split.protocol.keys import ServerKeys
from split.protocol.payload import Outgoing
from split.protocol.records import Sealer
from split.protocol.tickets import Identity, Ticket, TicketBook

_ABOUT = (
    "Test vectors of docs/wire.md. Byte strings are hexadecimal. The second stream resumes the "
    "lane of the first; the HIDDEN frame down was lost, and is sent again."
)
_IDENTITY = Identity("3f2a/train", 7, "Gericht München")
WIDTH = 4
_WIRES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Sent:
    """A frame of a stream, its sender, and the number of frames that it acknowledges."""

    direction: str
    frame: Frame
    acknowledged: int


def _hidden(first: float) -> torch.Tensor:
    return torch.linspace(first, 3.0, 2 * WIDTH).view(1, 2, WIDTH)


_LENGTHS = torch.tensor([2])
_COUNTS = {"side": "right", "targets": 1, "step_targets": 1, "micro_batches": 1}
_PLAN = {"steps": 1, "first_step": 6, "total_steps": 10, "longest": 2, "wants_gradient": True}
_ANSWER = Frame(Kind.HIDDEN, tensors={"hidden": _hidden(-1.0)})
_CONFIRMED = [Sent(direction, Frame(Kind.CONFIRM), 0) for direction in ("down", "up")]
_STREAMS = {
    "ml-kem-768-x25519": [
        [
            *_CONFIRMED,
            Sent("up", Frame(Kind.JOIN, fields=_PLAN), 0),
            Sent("down", Frame(Kind.WELCOME, fields={"credits": 4}), 1),
            Sent(
                "up",
                Frame(
                    Kind.HIDDEN,
                    tensors={"hidden": _hidden(-2.5), "lengths": _LENGTHS},
                    fields=_COUNTS,
                ),
                1,
            ),
            Sent("down", _ANSWER, 2),
        ],
        [
            Sent("down", Frame(Kind.CONFIRM), 2),
            Sent("up", Frame(Kind.CONFIRM), 1),
            Sent("down", _ANSWER, 2),
            Sent("up", Frame(Kind.GRADIENT, tensors={"gradient": _hidden(1e-3)}), 2),
            Sent("up", Frame(Kind.ERROR, fields={"message": "enough"}), 2),
        ],
    ],
    "rsa-3072": [_CONFIRMED],
}


def _fixed(name: str, size: int = 32) -> bytes:
    return hashlib.shake_256(f"chambers wire vectors: {name}".encode()).digest(size)


def _rsa_key() -> bytes:
    made = rsa.generate_private_key(65537, 3072)
    return made.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def server_keys(suite: Any, private: dict[str, str]) -> ServerKeys:
    """Return a server's key pair, created from private keys."""
    key: Any
    if suite == "rsa-3072":
        key = serialization.load_der_private_key(bytes.fromhex(private["pkcs8"]), None)
        public = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    else:
        kem = mlkem.MLKEM768PrivateKey.from_seed_bytes(bytes.fromhex(private["ml-kem-768-seed"]))
        curve = X25519PrivateKey.from_private_bytes(bytes.fromhex(private["x25519"]))
        key = MLKEM768X25519PrivateKey(kem, curve)
        public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
    made = ServerKeys("ml-kem-768-x25519")
    made.suite, made._key = suite, (key, public)
    return made


@contextmanager
def _drawing(*values: bytes, shares: Sequence[str] = ()) -> Iterator[None]:
    """Make our code draw the given secrets and X25519 keys."""
    made = [X25519PrivateKey.from_private_bytes(bytes.fromhex(each)) for each in shares]
    with (
        patch.object(secrets, "token_bytes", side_effect=values),
        patch.object(handshake, "X25519PrivateKey") as curve,
    ):
        curve.generate.side_effect = made
        yield


def shake_hands(case: dict[str, Any], book: TicketBook) -> dict[str, Any]:
    """Complete a handshake with the secrets of a case; return its messages and keys.

    Args:
        case: Secrets, and the wrapped secret unless it must be wrapped again.
        book: Ticket book that contains the case's ticket.

    """
    ticket = Ticket(*(bytes.fromhex(case[name]) for name in ("ticket", "ticket_secret")))
    pair = server_keys(case["suite"], case["server_private"])
    with _drawing(bytes.fromhex(case["secret"]), shares=[case["client_private"]]):
        client = ClientHandshake(ticket, _IDENTITY, pair.public, case["suite"])
    if "wrapped" in case:
        with patch.object(handshake, "wrap", return_value=bytes.fromhex(case["wrapped"])):
            first = client.hello()
    else:
        first = client.hello()
    server = ServerHandshake(pair, book)
    server.read(first)
    with _drawing(shares=[case["server_share_private"]]):
        second = server.answer()
    third, keys_of_stream = client.finish(second)
    accepted, used = server.accept(third)
    assert accepted == keys_of_stream
    book.accept(used, accepted.resumption)
    found = {
        "server_key": pair.public,
        "m1": first,
        "m2": second,
        "m3": third,
        "up": accepted.up,
        "down": accepted.down,
        "resumption_ticket": accepted.resumption.identifier,
        "resumption_secret": accepted.resumption.secret,
    }
    size = 384 if case["suite"] == "rsa-3072" else 1168
    return {"wrapped": first[-32 - size : -32].hex()} | {n: v.hex() for n, v in found.items()}


def seal(case: dict[str, Any], sent: Sequence[Sent]) -> list[dict[str, Any]]:
    """Return a stream's frames with their records."""
    limits = Limits(WIDTH, "bfloat16", 8)
    sealers = {name: Sealer(bytes.fromhex(case[name])) for name in ("up", "down")}
    frames = []
    for each in sent:
        frame = each.frame
        content = Outgoing(frame, limits).write()
        (record,) = sealers[each.direction].seal(frame, each.acknowledged, content)
        frames.append(
            {
                "direction": each.direction,
                "kind": frame.kind.name,
                "step": frame.step,
                "micro_batch": frame.micro_batch,
                "acknowledged": each.acknowledged,
                "fields": frame.fields,
                "payload": bytes(content).hex(),
                "record": record.hex(),
            }
        )
    return frames


def streams(wrapped: Sequence[str] = (), rsa_key: str = "") -> list[dict[str, Any]]:
    """Return all streams.

    Args:
        wrapped: The wrapped secrets; if empty, secrets are wrapped again.
        rsa_key: The server's RSA key; if empty, a new key is created.

    """
    made: list[dict[str, Any]] = []
    for suite, of_lane in _STREAMS.items():
        ticket, secret = _fixed(f"{suite} ticket", 16), _fixed(f"{suite} ticket's secret")
        book = TicketBook()
        with _drawing(ticket, secret, bytes(16)):
            book.issue(_IDENTITY, 1e6)
        private = {
            "ml-kem-768-seed": _fixed("ML-KEM", 64).hex(),
            "x25519": _fixed("X25519").hex(),
        }
        if suite == "rsa-3072":
            private = {"pkcs8": rsa_key or _rsa_key().hex()}
        for sent in of_lane:
            number = len(made)
            case: dict[str, Any] = {
                "suite": suite,
                "run": _IDENTITY.run,
                "round": _IDENTITY.round,
                "node": _IDENTITY.node,
                "ticket": ticket.hex(),
                "ticket_secret": secret.hex(),
                "server_private": private,
                "client_private": _fixed(f"{number} client").hex(),
                "server_share_private": _fixed(f"{number} server").hex(),
                "secret": _fixed(f"{number} wrapped").hex(),
            }
            if wrapped:
                case["wrapped"] = wrapped[number]
            case |= shake_hands(case, book)
            case["frames"] = seal(case, sent)
            made.append(case)
            ticket, secret = (
                bytes.fromhex(case[f"resumption_{name}"]) for name in ("ticket", "secret")
            )
    return made


def payloads() -> list[dict[str, Any]]:
    """Return a frame of hidden states in each wire type."""
    hidden = torch.tensor([[[0.1, -0.7, 254.0, 0.5], [0.0, 0.0, 0.0, 0.0]]])
    made = []
    for wire in _WIRES:
        frame = Frame(
            Kind.HIDDEN, tensors={"hidden": hidden, "lengths": _LENGTHS}, fields={"side": "left"}
        )
        content = Outgoing(frame, Limits(WIDTH, wire, 8)).write()
        made.append(
            {
                "wire_dtype": wire,
                "hidden": hidden.tolist(),
                "lengths": _LENGTHS.tolist(),
                "fields": frame.fields,
                "payload": bytes(content).hex(),
            }
        )
    return made


if __name__ == "__main__":
    written = {"about": _ABOUT, "version": 4, "streams": streams(), "payloads": payloads()}
    print(json.dumps(written, indent=1, ensure_ascii=False))
