"""The content of an authenticated message: records as bytes, encrypted arrays, and their digest.

Flower stores a message as a tree of objects whose ids are digests of their contents. It rejects an
object that was announced earlier with different children, so an attacker who can predict an object
can block it. To prevent this, records without arrays are sent as bytes together with random
values, and arrays are encrypted (AES-256-CTR) with random keys. The keys are sent in the same
message, so encryption does not hide the arrays from anyone who reads the message.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from federation.flower_internals import RecordDictProto, recorddict_from_proto, recorddict_to_proto

# Name of the record that contains the encryption keys, keyed by the names of the ArrayRecords.
_ARRAY_KEYS = "array-keys"
_KEY_BYTES = 32


class EncryptedArrays:
    """Encrypts ArrayRecords, each with a random key and only once.

    Recipients of the same adapter receive the same objects, which a SuperLink stores once.
    """

    def __init__(self) -> None:
        # Keyed by a record's id(); the reference to the record prevents Python from reusing the id.
        self._known: dict[int, tuple[ArrayRecord, bytes, ArrayRecord, str]] = {}

    def encrypt(self, record: ArrayRecord) -> tuple[bytes, ArrayRecord, str]:
        """Return the key, the encrypted record, and the digest of the encrypted record."""
        if id(record) not in self._known:
            key = secrets.token_bytes(_KEY_BYTES)
            encrypted = _applied(key, record)
            self._known[id(record)] = record, key, encrypted, _record_digest(encrypted)
        _, key, encrypted, digest = self._known[id(record)]
        return key, encrypted, digest


def pack(content: RecordDict, shared: EncryptedArrays) -> tuple[bytes, dict[str, ArrayRecord], str]:
    """Convert the content of a message to the form in which it is sent.

    Return the records without arrays, serialised with the keys of the arrays; the encrypted
    ArrayRecords; and the digest of both, in hexadecimal.
    """
    keys, others = ConfigRecord(), RecordDict()
    arrays, digests = dict[str, ArrayRecord](), dict[str, str]()
    for name, record in content.items():
        # Encryption can't make the object id of an empty ArrayRecord unpredictable.
        if isinstance(record, ArrayRecord) and record:
            keys[name], arrays[name], digests[name] = shared.encrypt(record)
        else:
            others[name] = record
    others[_ARRAY_KEYS] = keys
    body = recorddict_to_proto(others).SerializeToString()
    return body, arrays, _digest(body, digests)


def unpack(body: bytes, arrays: Mapping[str, ArrayRecord]) -> RecordDict:
    """Reverse ``pack``: return a message's content; raise ``ValueError`` if it is malformed."""
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
    """Encrypt or decrypt arrays; each array uses a separate range of the counter."""
    changed = {}
    for index, (name, array) in enumerate(record.items()):
        cipher = Cipher(AES(key), CTR(index.to_bytes(8, "big") + bytes(8)))
        data = cipher.encryptor().update(array.data)
        changed[name] = Array(array.dtype, tuple(array.shape), array.stype, data)
    return ArrayRecord(changed)


def digest_of(body: bytes, arrays: Mapping[str, ArrayRecord]) -> str:
    """Return the digest of received content."""
    return _digest(body, {name: _record_digest(record) for name, record in arrays.items()})


def _digest(body: bytes, arrays: Mapping[str, str]) -> str:
    """Return the digest of a message's content; ``arrays`` are digests of encrypted arrays."""
    parts = [part.encode() for name in sorted(arrays) for part in (name, arrays[name])]
    return _hash([body, *parts])


def _record_digest(record: ArrayRecord) -> str:
    """Return the digest of an ArrayRecord; the digest depends on the order of the arrays."""
    parts: list[bytes] = []
    for name, array in record.items():
        header = f"{array.dtype}\n{array.stype}\n{list(array.shape)}"
        parts += [name.encode(), header.encode(), array.data]
    return _hash(parts)


def _hash(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 digest of a sequence of parts, each prefixed with its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()
