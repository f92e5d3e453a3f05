"""The content of an authenticated message: records as bytes, encrypted arrays, and their digest.

Flower stores messages as objects whose ids are digests of their contents, and refuses an object
that was announced before with other children. An object that can be predicted can thus be blocked.
So records without arrays travel as bytes, beside random values, and arrays are encrypted
(AES-256-CTR) with random keys that are among these records. The keys hide nothing from whoever
receives the message.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from federation.flower_internals import RecordDictProto, recorddict_from_proto, recorddict_to_proto

# Among the records in the bytes: the keys of the ArrayRecords, by name.
_ARRAY_KEYS = "array-keys"
_KEY_BYTES = 32


class EncryptedArrays:
    """ArrayRecords that are encrypted, each with a random key and only once.

    Recipients of the same adapter receive the same objects, which a SuperLink stores once.
    """

    def __init__(self) -> None:
        # With the record itself, so that no other one can have its id.
        self._known: dict[int, tuple[ArrayRecord, bytes, ArrayRecord, str]] = {}

    def encrypt(self, record: ArrayRecord) -> tuple[bytes, ArrayRecord, str]:
        """Return the key, the encrypted record, and its digest."""
        if id(record) not in self._known:
            key = secrets.token_bytes(_KEY_BYTES)
            encrypted = _applied(key, record)
            self._known[id(record)] = record, key, encrypted, _record_digest(encrypted)
        _, key, encrypted, digest = self._known[id(record)]
        return key, encrypted, digest


@dataclass(frozen=True)
class PackedContent:
    """The content of a message as it travels.

    Attributes:
        body: The records without arrays, and the arrays' keys.
        arrays: The encrypted ArrayRecords.
        digest: Digest of both, in hexadecimal.

    """

    body: bytes
    arrays: dict[str, ArrayRecord]
    digest: str


def pack(content: RecordDict, shared: EncryptedArrays) -> PackedContent:
    """Return the content of a message as it travels."""
    keys, others = ConfigRecord(), RecordDict()
    arrays, digests = dict[str, ArrayRecord](), dict[str, str]()
    for name, record in content.items():
        # An empty record's id can be predicted.
        if isinstance(record, ArrayRecord) and record:
            keys[name], arrays[name], digests[name] = shared.encrypt(record)
        else:
            others[name] = record
    others[_ARRAY_KEYS] = keys
    body = recorddict_to_proto(others).SerializeToString()
    return PackedContent(body, arrays, _digest(body, digests))


def unpack(body: bytes, arrays: Mapping[str, ArrayRecord]) -> RecordDict:
    """Return the content of a message.

    Raises:
        ValueError: It is malformed.

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
        raise ValueError("the message's content is malformed") from error
    return content


def _applied(key: bytes, record: ArrayRecord) -> ArrayRecord:
    """Encrypt or decrypt arrays, each with a part of the key's stream that is its own."""
    changed = {}
    for index, (name, array) in enumerate(record.items()):
        cipher = Cipher(AES(key), CTR(index.to_bytes(8, "big") + bytes(8)))
        data = cipher.encryptor().update(array.data)
        changed[name] = Array(array.dtype, tuple(array.shape), array.stype, data)
    return ArrayRecord(changed)


def digest_of(body: bytes, arrays: Mapping[str, ArrayRecord]) -> str:
    """Return the digest of a content that was received."""
    return _digest(body, {name: _record_digest(record) for name, record in arrays.items()})


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
