"""Key pairs in OpenSSH format: ``FILE`` and ``FILE.pub``, as written by ``ssh-keygen``."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from chambers.errors import CommandError, read_bytes
from finetuning.files import replacing, write_secret

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | Ed25519PublicKey


def read_private_key(file: Path) -> object:
    """Read a private key in OpenSSH format; return None if it is invalid or has a passphrase."""
    try:
        return load_ssh_private_key(read_bytes(file), password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        return None


def public_line(key: PublicKey, comment: str) -> str:
    """Return the line that a public key file contains."""
    public = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode()} {comment}"


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
    with replacing(public) as aside:
        aside.write_text(public_line(key.public_key(), file.name) + "\n")
    return public
