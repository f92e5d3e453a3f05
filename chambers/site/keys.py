"""Key pairs in OpenSSH format: node keys, keys that sign instructions, and reviewers' keys."""

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from chambers.errors import CommandError, read_bytes
from federation import authentication
from federation.run_config import ConfigError
from federation.site_policy import PolicyError
from finetuning.files import write_file, write_secret

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey
KEY, PUBLIC = "instructions.key", "instructions.pub"


def open_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node key that Flower accepts and other users can't read; create it if missing.

    The public key is in the file with the suffix ``.pub``.
    """
    if not file.exists():
        # Flower reads only keys on NIST curves in OpenSSH format, without a passphrase.
        write_pair(file, ec.generate_private_key(ec.SECP384R1()))
    key = read_node_key(file)
    _complete(file.with_name(f"{file.name}.pub"), key)
    return key


def open_peer_key(file: Path) -> Path:
    """Return the path of the public half of a key for masked sums; create the pair if missing."""
    if not file.exists():
        return write_pair(file, Ed25519PrivateKey.generate())
    key = authentication.parse_private_key(read_bytes(file))
    if not isinstance(key, Ed25519PrivateKey):
        raise CommandError(f"{file} is not a key for masked sums: move it away")
    return _complete(file.with_name(f"{file.name}.pub"), key)


def _complete(public: Path, key: PrivateKey) -> Path:
    """Write the public half of a key if it is missing, as after an interrupted command."""
    if not public.exists():
        write_file(public, public_line(key.public_key(), public.stem))
    return public


def read_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node key that Flower accepts and that other users can't read."""
    key = authentication.parse_private_key(read_bytes(file))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CommandError(
            f"{file} is not a key that Flower can read (elliptic curve, OpenSSH format, no "
            "passphrase); chambers site join writes one"
        )
    check_secret(file)
    return key


def read_node_public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Read a node's public key; raise ``CommandError`` if the file isn't one."""
    key = authentication.parse_public_key(read_bytes(file))
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CommandError(f"{file} is not the node.pub that chambers site join has written")
    return key


def hash_node_key(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 digest of the ``node.pub`` that ``chambers site join`` writes."""
    return hashlib.sha256(public_line(key).encode()).hexdigest()


def open_instructions(folder: Path) -> Path:
    """Return the path of the coordinator's public key; create the key pair if it doesn't exist."""
    file, public = folder / KEY, folder / PUBLIC
    if file.exists():
        _complete(public, authentication.read_private_key(file))
    elif not public.exists():
        write_pair(file, Ed25519PrivateKey.generate(), public)
    check_instructions(folder)
    return public


def check_instructions(folder: Path) -> str:
    """Check the key pair that signs instructions; return a description.

    Raise ``CommandError`` if a file is missing or invalid, the keys don't match, or other users can
    read the private key.
    """
    file, public = folder / KEY, folder / PUBLIC
    try:
        key = authentication.read_private_key(file)
        same = authentication.read_public_key(str(public)) == key.public_key()
    except (ConfigError, PolicyError) as error:
        raise CommandError(
            f"{error}: restore both {KEY} and {PUBLIC}; or remove both, run chambers site "
            f"coordinator again, and send every institution the new {PUBLIC}"
        ) from error
    if not same:
        raise CommandError(f"{public} is not the public half of {file}")
    check_secret(file)
    return f"{file} signs instructions; {public} is its public half"


def check_secret(file: Path) -> None:
    """Raise ``CommandError`` if other users can read a file."""
    if file.stat().st_mode & 0o077:
        raise CommandError(f"{file} can be read by other users: chmod 600 {file}")


def write_pair(file: Path, key: PrivateKey, public: Path | None = None) -> Path:
    """Write a private key without a passphrase, readable only by this user, and the public key.

    Return the path of the public key, by default ``FILE.pub``; refuse to overwrite a file.
    """
    public = public or file.with_name(f"{file.name}.pub")
    for target in (file, public):
        if target.exists():
            raise CommandError(
                f"{target} exists: move it away for a new key, which must be admitted or trusted"
            )
    write_secret(file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return _complete(public, key)


def public_line(key: ec.EllipticCurvePublicKey | Ed25519PublicKey, comment: str = "node") -> str:
    """Return the content of a public key's file, in OpenSSH's format."""
    return f"{key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {comment}\n"
