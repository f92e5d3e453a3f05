"""Fixed-point numbers, pairwise masks, and their sums modulo 2³² and 2⁶⁴.

A client sends q = rint(p · x · scale) + masks for each number x, where p is its share of the
group's weight. The masks of two members cancel in the sum if both have derived them from the same
digest of all that they received. Since the shares sum to 1, no sum can overflow.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from federation.sums.members import SumError

Arrays = dict[str, npt.NDArray[np.unsignedinteger]]
Floats = npt.NDArray[np.float64]

# Name and length of the array by which the coordinator notices masks that don't cancel.
CHECK, CHECKS = "sum.check", 4
_ROUND, _MASK = b"Chambers sum round 1\n", b"Chambers sum mask 1\n"
_UPDATE_BITS, _WIDE_BITS, _WIDE_MAX = 30, 42, 2.0**20


def framed(parts: Iterable[bytes]) -> bytes:
    """Return byte strings one after another, each after its length in 8 bytes (big endian)."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def round_digest(
    facts: Mapping[str, object],
    arrays: Mapping[str, Mapping[str, npt.NDArray[np.generic]]],
    announcements: Iterable[bytes],
) -> bytes:
    """Return the SHA-256 digest of all that determines a client's part of a sum.

    ``facts`` can be written as JSON; ``arrays`` are the received arrays by record and name, and
    ``announcements`` the group's announcements in the order of the names.
    """
    digest = hashlib.sha256(_ROUND)
    digest.update(framed([json.dumps(facts, sort_keys=True).encode(), *announcements]))
    for record, named in sorted(arrays.items()):
        for name, array in sorted(named.items()):
            about = (record, name, array.dtype.str, str(array.shape))
            digest.update(framed([*(text.encode() for text in about), array.tobytes()]))
    return digest.digest()


def encode_update(
    change: npt.NDArray[np.floating], share: float, bound: float
) -> npt.NDArray[np.uint32]:
    """Return a member's part of a sum of changes, each limited to ±``bound``, as uint32.

    Raise ``FloatingPointError`` if a value isn't a finite number.
    """
    scaled = share * np.clip(_finite(change), -bound, bound) * (2.0**_UPDATE_BITS / bound)
    return np.rint(scaled).astype(np.int64).astype(np.uint32)


def decode_update(total: npt.NDArray[np.uint32], clients: int, bound: float) -> Floats:
    """Return the weighted mean of the members' changes; raise ``SumError`` if it is impossible."""
    signed = total.view(np.int32).astype(np.int64)
    if np.abs(signed).max(initial=0) > 2**_UPDATE_BITS + clients / 2:
        raise SumError("a change is beyond sums.bound")
    return np.asarray(signed * (bound * 2.0**-_UPDATE_BITS), dtype=np.float64)


def encode_wide(values: npt.NDArray[np.floating], share: float) -> npt.NDArray[np.uint64]:
    """Return a member's part of a sum of values from 0 to 2²⁰, with 42 bits after the point.

    Raise ``FloatingPointError`` if a value isn't a finite number.
    """
    scaled = share * np.clip(_finite(values), 0.0, _WIDE_MAX) * 2.0**_WIDE_BITS
    return np.rint(scaled).astype(np.uint64)


def decode_wide(total: npt.NDArray[np.uint64], clients: int) -> Floats:
    """Return the weighted mean of the members' values; raise ``SumError`` if it is impossible."""
    if total.max(initial=0) > _WIDE_MAX * 2.0**_WIDE_BITS + clients / 2:
        raise SumError("a value is beyond 2²⁰")
    return np.asarray(total * 2.0**-_WIDE_BITS, dtype=np.float64)


def _finite(values: npt.NDArray[np.floating]) -> Floats:
    if not np.isfinite(values).all():
        raise FloatingPointError("the values to be summed are not finite numbers")
    return values.astype(np.float64)


def check_array(weight: int) -> npt.NDArray[np.uint64]:
    """Return the array ``CHECK`` of a member, whose sum the coordinator knows."""
    return np.full(CHECKS, weight, dtype=np.uint64)


class Masks:
    """The pairwise masks of one member for one digest."""

    def __init__(
        self, digest: bytes, own: str, key: X25519PrivateKey, peers: Mapping[str, str]
    ) -> None:
        """Agree on secrets with ``peers``, whose X25519 public keys are in hexadecimal.

        Raise ``SumError`` if a public key is unusable.
        """
        self._digest, self._own = digest, own
        try:
            self._secrets = {
                name: key.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
                for name, public in peers.items()
            }
        except ValueError as error:  # a point of low order
            raise SumError("a member's key can't be used") from error
        self._zeros = self._stream = bytearray()

    def add_to(self, arrays: Arrays) -> None:
        """Add the masks to arrays, in place: the smaller name of a pair adds, the other subtracts.

        Each array has masks of its own, so its name must not occur twice under the same digest.
        """
        for name, array in arrays.items():
            flat = array.reshape(-1)
            for peer in self._secrets:
                mask = self._mask(peer, name, array.nbytes).view(array.dtype.newbyteorder("<"))
                if self._own < peer:
                    flat += mask
                else:
                    flat -= mask

    def _mask(self, peer: str, array: str, size: int) -> npt.NDArray[np.uint8]:
        """Return ``size`` bytes of the stream that this member and ``peer`` have for an array."""
        if len(self._zeros) < size:  # allocating buffers for each array takes 7 times as long
            self._zeros, self._stream = bytearray(size), bytearray(size + 15)
        about = framed(text.encode() for text in (array, *sorted((self._own, peer))))
        kdf = HKDF(algorithm=SHA256(), length=32, salt=self._digest, info=_MASK + about)
        encryptor = Cipher(AES(kdf.derive(self._secrets[peer])), CTR(bytes(16))).encryptor()
        encryptor.update_into(memoryview(self._zeros)[:size], self._stream)
        return np.frombuffer(self._stream, dtype=np.uint8, count=size)


def sum_arrays(uploads: Iterator[Mapping[str, npt.NDArray[np.unsignedinteger]]]) -> Arrays:
    """Return the sum of the members' uploads, modulo 2³² or 2⁶⁴."""
    total = {name: array.copy() for name, array in next(uploads).items()}
    for upload in uploads:
        for name, array in upload.items():
            total[name] += array
    return total
