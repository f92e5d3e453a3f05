"""Node keys, which authenticate institutions to the coordinator's SuperLink."""

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from chambers.errors import CommandError, read_bytes
from chambers.site.ssh_keys import public_line, read_private_key, write_pair
from finetuning.files import replacing


def open_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node key that Flower accepts and other users can't read; create it if missing.

    The public key is in the file with the suffix ``.pub``.
    """
    public = file.with_name(f"{file.name}.pub")
    if not file.exists():
        # Flower reads only keys on NIST curves in OpenSSH format, without a passphrase.
        write_pair(file, ec.generate_private_key(ec.SECP384R1()))
    key = read_node_key(file)
    if not public.exists():
        with replacing(public) as aside:
            aside.write_text(_line(key.public_key()))
    return key


def read_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a node key that Flower accepts and that other users can't read."""
    key = read_private_key(file)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CommandError(
            f"{file} is not a key that Flower can read (elliptic curve, OpenSSH format, no "
            "passphrase); chambers site join writes one"
        )
    if file.stat().st_mode & 0o077:
        raise CommandError(f"{file} can be read by other users: chmod 600 {file}")
    return key


def read_public_key(file: Path) -> ec.EllipticCurvePublicKey:
    """Read a node's public key; raise ``CommandError`` if the file isn't one."""
    try:
        key = load_ssh_public_key(read_bytes(file))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise CommandError(f"{file} is not the node.pub that chambers site join has written")
    return key


def digest(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 digest of the ``node.pub`` that ``chambers site join`` writes."""
    return hashlib.sha256(_line(key).encode()).hexdigest()


def _line(key: ec.EllipticCurvePublicKey) -> str:
    return f"{public_line(key, 'node')}\n"
