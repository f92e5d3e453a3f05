"""Key pairs in OpenSSH format: ``FILE`` and ``FILE.pub``, as written by ``ssh-keygen``."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from chambers.errors import CommandError
from finetuning.files import replacing, write_secret

PrivateKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey


def public_file(file: Path) -> Path:
    """Return the path of the public key for the path of a private key."""
    return file.with_name(f"{file.name}.pub")


def read_private_key(file: Path) -> object:
    """Read a private key in OpenSSH format; return None if it is invalid or has a passphrase.

    Raises:
        CommandError: The file can't be read.

    """
    try:
        return load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise CommandError(f"{file} can't be read: {error.strerror}") from error
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        return None


def public_line(key: PrivateKey, comment: str) -> str:
    """Return the line of a public key file."""
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode()} {comment}"


def write_pair(file: Path, key: PrivateKey, public: Path | None = None) -> None:
    """Write a private key without passphrase, readable only by this user, and the public key.

    Args:
        file: Path of the private key.
        key: The private key.
        public: Path of the public key; None for ``FILE.pub``.

    Raises:
        CommandError: A file already exists.
        OSError: A file can't be written.

    """
    public = public or public_file(file)
    for target in (file, public):
        if target.exists():
            raise CommandError(
                f"{target} exists; a new key needs a new name, and must be registered or trusted"
            )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    write_secret(file, secret)
    with replacing(public) as aside:
        aside.write_text(public_line(key, file.name) + "\n")
