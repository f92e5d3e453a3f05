"""Instructions that the coordinator signs, and replies that their recipients authenticate.

Flower authenticates the SuperNode that sends a request, and not the message in the request: any
registered SuperNode can store a message for another one, with the coordinator as its sender. So an
instruction carries an Ed25519 signature, and a secret under which its recipient authenticates the
reply (HMAC-SHA-256). Both cover everything that a message contains.

Flower stores messages as objects whose ids are digests of their contents, and refuses an object
that was announced before with other children. An object that can be predicted can thus be blocked.
So records without arrays travel as bytes in one record that has random values, and arrays are
encrypted (AES-256-CTR) with random keys that this record contains. The keys hide nothing from
whoever receives the message.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

# The records of authenticated messages: one of these, and encrypted ArrayRecords.
INSTRUCTION, REPLY = "signed-instruction", "authenticated-reply"
# Among the records in its bytes: the keys of the ArrayRecords, by name.
_ARRAY_KEYS = "array-keys"
_SIGNED, _AUTHENTICATED = b"Chambers instruction 1\n", b"Chambers reply 1\n"
_NONCE_BYTES, _SECRET_BYTES, _KEY_BYTES = 16, 32, 32
# Clocks of coordinator and institutions may differ by so much.
CLOCK_SECONDS = 300.0


class AuthenticationError(ValueError):
    """A message isn't from whom it should be, or it isn't for this recipient, or not for now."""


class Statement(BaseModel):
    """What the coordinator signs.

    Attributes:
        run: Flower's id of the run. The run's lineage and the round are in the content.
        kind: Flower's type of the message.
        node: Flower's id of the recipient's SuperNode.
        nonce: Random, in hexadecimal; different in every instruction.
        time: When it was signed, in seconds since 1970; later in every instruction of a run.
        expires: Until when it may be carried out.
        secret: Secret of the reply, in hexadecimal.
        digest: Digest of the content, in hexadecimal.

    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: int
    kind: str
    node: int
    nonce: str = Field(pattern=f"^[0-9a-f]{{{2 * _NONCE_BYTES}}}$")
    time: FiniteFloat
    expires: FiniteFloat
    secret: str = Field(pattern=f"^[0-9a-f]{{{2 * _SECRET_BYTES}}}$")
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Signer:
    """Signs the instructions of a run.

    Args:
        key: The coordinator's key.

    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._last = 0.0

    def sign(self, message: Message, shared: "EncryptedArrays") -> Statement:
        """Replace a message's content by one that is signed; return the statement about it.

        Args:
            message: An instruction; its metadata doesn't change.
            shared: ArrayRecords that are encrypted once for several messages.

        """
        body, arrays = _packed(message.content, shared)
        # Clocks are set back at times, and have steps.
        self._last = max(time.time(), self._last + 1e-3)
        statement = Statement(
            run=message.metadata.run_id,
            kind=message.metadata.message_type,
            node=message.metadata.dst_node_id,
            nonce=secrets.token_hex(_NONCE_BYTES),
            time=self._last,
            expires=self._last + message.metadata.ttl,
            secret=secrets.token_hex(_SECRET_BYTES),
            digest=_digest(body, {name: shared.digest(record) for name, record in arrays.items()}),
        )
        text = statement.model_dump_json().encode()
        signature = self._key.sign(_SIGNED + text)
        record = ConfigRecord({"statement": text, "signature": signature, "records": body})
        message.content = RecordDict({INSTRUCTION: record, **arrays})
        return statement


class EncryptedArrays:
    """ArrayRecords that are encrypted, each with a random key and only once.

    Recipients of the same adapter receive the same objects, which a SuperLink stores once.
    """

    def __init__(self) -> None:
        # With the record itself, so that no other one can have its id.
        self._known: dict[int, tuple[ArrayRecord, bytes, ArrayRecord]] = {}
        self._digests: dict[int, str] = {}

    def encrypt(self, record: ArrayRecord) -> tuple[bytes, ArrayRecord]:
        """Return the key and the encrypted record."""
        if id(record) not in self._known:
            key = secrets.token_bytes(_KEY_BYTES)
            encrypted = _applied(key, record)
            self._known[id(record)] = record, key, encrypted
            self._digests[id(encrypted)] = _record_digest(encrypted)
        _, key, encrypted = self._known[id(record)]
        return key, encrypted

    def digest(self, encrypted: ArrayRecord) -> str:
        """Return the digest of an encrypted record."""
        return self._digests[id(encrypted)]


@dataclass(frozen=True)
class SignedInstruction:
    """A signed instruction as it was received; nothing of it is checked yet.

    Attributes:
        text: The statement as it was signed.
        statement: The statement.
        signature: The coordinator's signature.
        body: The records without arrays.
        arrays: The encrypted arrays.

    """

    text: bytes
    statement: Statement
    signature: bytes
    body: bytes
    arrays: Mapping[str, ArrayRecord]

    @classmethod
    def of(cls, message: Message) -> "SignedInstruction | None":
        """Return the signed instruction in a message; None if it isn't signed.

        Raises:
            AuthenticationError: It is malformed.

        """
        record = message.content.config_records.get(INSTRUCTION)
        if record is None:
            return None
        text, signature, body = _bytes_of(record, "statement", "signature", "records")
        try:
            statement = Statement.model_validate_json(text)
        except ValidationError as error:
            raise AuthenticationError("the instruction's statement is malformed") from error
        return cls(text, statement, signature, body, dict(message.content.array_records))

    def verify(self, key: Ed25519PublicKey, message: Message, node: int, run: int) -> None:
        """Check that the coordinator has signed this content, for this recipient and this time.

        Args:
            key: The coordinator's key.
            message: The message that it came in.
            node: Id of this SuperNode.
            run: Id of the run.

        Raises:
            AuthenticationError: It hasn't.

        """
        statement, now = self.statement, time.time()
        try:
            key.verify(self.signature, _SIGNED + self.text)
        except InvalidSignature as error:
            raise AuthenticationError(
                "the instruction is not signed with the coordinator's key (instruction-key in the "
                "site's policy)"
            ) from error
        if statement.digest != self._digest():
            raise AuthenticationError("the instruction's content is not what was signed")
        if statement.node != node:
            raise AuthenticationError("the instruction is for another institution")
        if (statement.run, statement.kind) != (run, message.metadata.message_type):
            raise AuthenticationError("the instruction is for another run, or of another kind")
        if now > statement.expires + CLOCK_SECONDS:
            raise AuthenticationError(
                f"the instruction expired {now - statement.expires:.0f} s ago; compare this "
                "machine's clock with the coordinator's"
            )
        if statement.time > now + CLOCK_SECONDS:
            raise AuthenticationError(
                f"the instruction is from {statement.time - now:.0f} s in the future; compare this "
                "machine's clock with the coordinator's"
            )

    def content(self) -> RecordDict:
        """Return the content.

        Raises:
            AuthenticationError: It is malformed.

        """
        return _unpacked(self.body, self.arrays)

    def authenticate(self, reply: Message) -> None:
        """Replace a reply's content by one that only the recipient can have made."""
        if reply.has_error():
            return
        shared = EncryptedArrays()
        body, arrays = _packed(reply.content, shared)
        digest = _digest(body, {name: shared.digest(record) for name, record in arrays.items()})
        record = ConfigRecord({"mac": _mac(self.statement, digest), "records": body})
        reply.content = RecordDict({REPLY: record, **arrays})

    def _digest(self) -> str:
        return _digest(self.body, {n: _record_digest(record) for n, record in self.arrays.items()})


def open_reply(reply: Message, statement: Statement) -> None:
    """Replace an authenticated reply's content by what it contains.

    Args:
        reply: A reply without error.
        statement: What the coordinator has signed for the one who should have made it.

    Raises:
        AuthenticationError: Someone else has made it, or it is malformed.

    """
    record = reply.content.config_records.get(REPLY)
    if record is None:
        raise AuthenticationError("it isn't authenticated")
    mac, body = _bytes_of(record, "mac", "records")
    arrays = dict(reply.content.array_records)
    digest = _digest(body, {name: _record_digest(each) for name, each in arrays.items()})
    if not hmac.compare_digest(mac, _mac(statement, digest)):
        raise AuthenticationError("it is not from the one who was asked, or was changed")
    reply.content = _unpacked(body, arrays)


def _packed(content: RecordDict, shared: EncryptedArrays) -> tuple[bytes, dict[str, ArrayRecord]]:
    """Return the records without arrays as bytes, and the others encrypted."""
    keys, arrays, others = ConfigRecord(), {}, RecordDict()
    for name, record in content.items():
        # An empty record's id can be predicted.
        if isinstance(record, ArrayRecord) and record:
            keys[name], arrays[name] = shared.encrypt(record)
        else:
            others[name] = record
    others[_ARRAY_KEYS] = keys
    return recorddict_to_proto(others).SerializeToString(), arrays


def _unpacked(body: bytes, arrays: Mapping[str, ArrayRecord]) -> RecordDict:
    """Return the content of a message.

    Raises:
        AuthenticationError: It is malformed.

    """
    try:
        content = recorddict_from_proto(RecordDictProto.FromString(body))
        keys: Any = content.config_records[_ARRAY_KEYS]
        del content[_ARRAY_KEYS]
        if keys.keys() != arrays.keys():
            raise KeyError(_ARRAY_KEYS)
        for name, record in arrays.items():
            content[name] = _applied(keys[name], record)
    except Exception as error:  # untrusted bytes can make Flower raise anything
        raise AuthenticationError("the message's content is malformed") from error
    return content


def _applied(key: bytes, record: ArrayRecord) -> ArrayRecord:
    """Encrypt or decrypt arrays, each with a part of the key's stream that is its own."""
    changed = {}
    for index, (name, array) in enumerate(record.items()):
        cipher = Cipher(AES(key), CTR(index.to_bytes(8, "big") + bytes(8)))
        data = cipher.encryptor().update(array.data)
        changed[name] = Array(array.dtype, tuple(array.shape), array.stype, data)
    return ArrayRecord(changed)


def _mac(statement: Statement, digest: str) -> bytes:
    text = _AUTHENTICATED + f"{statement.nonce}\n{statement.digest}\n{digest}".encode()
    return hmac.digest(bytes.fromhex(statement.secret), text, "sha256")


def _digest(body: bytes, arrays: Mapping[str, str]) -> str:
    """Return the digest of a content, from those of its encrypted ArrayRecords."""
    parts = [part.encode() for name in sorted(arrays) for part in (name, arrays[name])]
    return _hash([body, *parts])


def _record_digest(record: ArrayRecord) -> str:
    """Return the digest of an ArrayRecord; the order of its arrays counts."""
    return _hash(
        part
        for name, array in record.items()
        for part in (
            name.encode(),
            f"{array.dtype}\n{array.stype}\n{list(array.shape)}".encode(),
            array.data,
        )
    )


def _hash(parts: Iterable[bytes]) -> str:
    """Return the digest of a sequence of parts, each with its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _bytes_of(record: ConfigRecord, *names: str) -> list[bytes]:
    """Return the values of a record that has exactly these names.

    Raises:
        AuthenticationError: It has others, or values of other types.

    """
    values = [record.get(name) for name in names]
    if record.keys() != set(names) or not all(isinstance(value, bytes) for value in values):
        raise AuthenticationError("the message's record is malformed")
    return [value for value in values if isinstance(value, bytes)]
