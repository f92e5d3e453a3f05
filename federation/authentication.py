"""Signed instructions from the coordinator, and authenticated replies from the clients.

Flower authenticates the SuperNode that sends a request, but not the message in the request: any
registered SuperNode can send a message to another SuperNode in the coordinator's name. An
instruction therefore carries an Ed25519 signature, and a secret key that the recipient uses to
authenticate the reply (HMAC-SHA-256). The HMAC covers both the instruction and the reply.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from federation.flower_internals import HttpGrid
from federation.packed_content import EncryptedArrays, digest_of, pack, unpack
from federation.run_config import UNSIGNED, ConfigError, RunConfig, parse_run_config
from federation.site_policy import PolicyError
from finetuning.errors import UserError

# Record names: an authenticated message contains one of these records, and encrypted ArrayRecords.
INSTRUCTION, REPLY = "signed-instruction", "authenticated-reply"
_SIGNED, _AUTHENTICATED = b"Chambers instruction 1\n", b"Chambers reply 1\n"
_NONCE_BYTES, _SECRET_BYTES = 16, 32
# Maximum difference between the clocks of the coordinator and an institution.
CLOCK_SECONDS = 300.0


class AuthenticationError(UserError, ValueError):
    """A message is malformed, forged, replayed, expired, post-dated, or for another recipient."""


class Statement(BaseModel):
    """The statement that the coordinator signs for each instruction."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    run: int  # Flower's id of the run; the content contains the run's lineage, and the round
    kind: str  # Flower's message type
    node: int  # Flower's id of the recipient's SuperNode
    # Random; different in every instruction.
    nonce: str = Field(pattern=f"^[0-9a-f]{{{2 * _NONCE_BYTES}}}$")
    time: FiniteFloat  # Unix time of signing, in seconds; strictly increasing within a run
    expires: FiniteFloat  # Unix time after which the instruction must not be carried out
    # Key that authenticates the reply.
    secret: str = Field(pattern=f"^[0-9a-f]{{{2 * _SECRET_BYTES}}}$")
    digest: str = Field(pattern="^[0-9a-f]{64}$")  # digest of the instruction's content
    config: str = Field(pattern="^[0-9a-f]{64}$")  # digest of the run config, which Flower sends


class Signer:
    """Signs the instructions of a run, and its run config, with the coordinator's key."""

    def __init__(self, key: Ed25519PrivateKey, config: RunConfig) -> None:
        self._key = key
        self._config = config_digest(config)
        self._last = 0.0

    def sign(self, message: Message, shared: EncryptedArrays) -> Statement:
        """Replace a message's content with its signed version; return the signed statement.

        ``shared`` encrypts each ArrayRecord once, even if several messages contain the record.
        """
        body, arrays, digest = pack(message.content, shared)
        # The system clock may be set back, or have a coarse resolution.
        self._last = max(time.time(), self._last + 1e-3)
        statement = Statement(
            run=message.metadata.run_id,
            kind=message.metadata.message_type,
            node=message.metadata.dst_node_id,
            nonce=secrets.token_hex(_NONCE_BYTES),
            time=self._last,
            expires=self._last + message.metadata.ttl,
            secret=secrets.token_hex(_SECRET_BYTES),
            digest=digest,
            config=self._config,
        )
        text = statement.model_dump_json().encode()
        signature = self._key.sign(_SIGNED + text)
        record = ConfigRecord({"statement": text, "signature": signature, "records": body})
        message.content = RecordDict({INSTRUCTION: record, **arrays})
        return statement


@dataclass(frozen=True)
class SignedInstruction:
    """A received signed instruction that has not been verified yet."""

    text: bytes  # the statement as it was signed
    statement: Statement
    signature: bytes
    body: bytes  # the records without arrays, serialised
    arrays: Mapping[str, ArrayRecord]  # the encrypted arrays

    @classmethod
    def of(cls, content: RecordDict) -> "SignedInstruction | None":
        """Return the signed instruction in a message's content, or None if it is not signed.

        Raise ``AuthenticationError`` if the signed instruction is malformed.
        """
        record = content.config_records.get(INSTRUCTION)
        if record is None:
            return None
        text, signature, body = _bytes_of(record, "statement", "signature", "records")
        try:
            statement = Statement.model_validate_json(text)
        except ValidationError as error:
            raise AuthenticationError("the instruction's statement is malformed") from error
        return cls(text, statement, signature, body, dict(content.array_records))

    def verify(self, key: Ed25519PublicKey, message: Message, context: Context) -> None:
        """Verify that the coordinator signed this instruction for this recipient, run and time.

        ``message`` contains this instruction; ``context`` has Flower's ids of this SuperNode and of
        the run, and the run config. Raise ``AuthenticationError`` if the verification fails.
        """
        statement, now = self.statement, time.time()
        try:
            key.verify(self.signature, _SIGNED + self.text)
        except InvalidSignature as error:
            raise AuthenticationError(
                "the instruction is not signed with the coordinator's key (instruction-key in the "
                "site's policy)"
            ) from error
        if statement.digest != digest_of(self.body, self.arrays):
            raise AuthenticationError("the instruction's content differs from the signed content")
        if statement.node != context.node_id:
            raise AuthenticationError("the instruction is for a different institution")
        if (statement.run, statement.kind) != (context.run_id, message.metadata.message_type):
            raise AuthenticationError("the instruction is for a different run or kind of message")
        try:
            signed = statement.config == config_digest(parse_run_config(context.run_config))
        except ConfigError:
            signed = False
        if not signed:
            raise AuthenticationError("the run config differs from the one that was signed")
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
        """Return the content; raise ``AuthenticationError`` if it is malformed."""
        return _opened(self.body, self.arrays)

    def authenticate(self, reply: Message) -> None:
        """Authenticate a reply with the statement's secret, unless the reply is a Flower error."""
        if reply.has_error():
            return
        body, arrays, digest = pack(reply.content, EncryptedArrays())
        record = ConfigRecord({"mac": _mac(self.statement, digest), "records": body})
        reply.content = RecordDict({REPLY: record, **arrays})


def open_reply(reply: Message, statement: Statement) -> None:
    """Verify a reply that reports no Flower error, and unpack the reply's content in place.

    Raise ``AuthenticationError`` if the reply is malformed, or was not made by the client that
    received the signed ``statement``.
    """
    record = reply.content.config_records.get(REPLY)
    if record is None:
        raise AuthenticationError("it isn't authenticated")
    mac, body = _bytes_of(record, "mac", "records")
    arrays = dict(reply.content.array_records)
    if not hmac.compare_digest(mac, _mac(statement, digest_of(body, arrays))):
        raise AuthenticationError("it is not from the recipient of the instruction, or was changed")
    reply.content = _opened(body, arrays)


def _opened(body: bytes, arrays: Mapping[str, ArrayRecord]) -> RecordDict:
    try:
        return unpack(body, arrays)
    except ValueError as error:
        raise AuthenticationError(str(error)) from error


def _mac(statement: Statement, digest: str) -> bytes:
    text = _AUTHENTICATED + f"{statement.nonce}\n{statement.digest}\n{digest}".encode()
    return hmac.digest(bytes.fromhex(statement.secret), text, "sha256")


def _bytes_of(record: ConfigRecord, *names: str) -> list[bytes]:
    """Return a record's values; the record must contain exactly these names, each with bytes."""
    values = [value for name in names if isinstance(value := record.get(name), bytes)]
    if record.keys() != set(names) or len(values) < len(names):
        raise AuthenticationError("the message's record is malformed")
    return values


def config_digest(config: RunConfig) -> str:
    """Return the SHA-256 digest of a run config; missing keys have their default values."""
    return hashlib.sha256(json.dumps(config.flat(), sort_keys=True).encode()).hexdigest()


def signer_of(config: RunConfig, grid: Grid) -> Signer | None:
    """Return the signer of a run's instructions, or None in simulation or if signing is disabled.

    Raise ``ConfigError`` if the run config of a deployment names no key, or an unusable one.
    """
    if not isinstance(grid, HttpGrid):
        return None
    if config.instruction_key == UNSIGNED:
        log(
            WARNING,
            'instruction-key = "%s": any institution can send instructions to another one in the '
            "coordinator's name",
            UNSIGNED,
        )
        return None
    if not config.instruction_key:
        raise ConfigError(
            "instructions to institutions must be signed: set instruction-key to the file "
            "instructions.key that `chambers site coordinator` wrote, such as "
            'instruction-key = "/srv/chambers/instructions.key"; or to "none" if all institutions '
            "accept instructions that any of them can forge"
        )
    return Signer(read_private_key(Path(config.instruction_key).expanduser()), config)


def read_private_key(file: Path) -> Ed25519PrivateKey:
    """Read the coordinator's private key.

    Raise ``ConfigError`` if the file can't be read, or isn't an Ed25519 key without a passphrase.
    """
    try:
        key = parse_private_key(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"instruction-key = {str(file)!r} can't be read: {error.strerror}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"instruction-key = {str(file)!r} is not an Ed25519 key in OpenSSH's format without a "
            "passphrase; `chambers site coordinator` writes such a key"
        )
    return key


def read_public_key(file: str) -> Ed25519PublicKey:
    """Read the coordinator's public key from the file named in a site's policy.

    Raise ``PolicyError`` if the file can't be read, or doesn't contain an Ed25519 public key.
    """
    try:
        key = parse_public_key(Path(file).read_bytes())
    except OSError as error:
        raise PolicyError(
            f"the site's policy names instruction-key = {file!r}, which can't be read: "
            f"{error.strerror}"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise PolicyError(
            f"the site's policy names instruction-key = {file!r}, which is not an Ed25519 public "
            "key in OpenSSH's format; name a copy of the coordinator's instructions.pub"
        )
    return key


def parse_private_key(content: bytes) -> object:
    """Parse a key in OpenSSH's format; return None if it is invalid or has a passphrase."""
    try:
        return load_ssh_private_key(content, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        return None


def parse_public_key(content: bytes) -> object:
    """Parse a key in OpenSSH's format; return None if it is invalid."""
    try:
        return load_ssh_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        return None
