"""The coordinator's key pair for signing instructions, in the folder of its certificates."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from chambers.errors import CommandError
from chambers.site.ssh_keys import write_pair
from federation.authentication import read_private_key, read_public_key
from federation.run_config import ConfigError
from federation.site_policy import PolicyError

KEY, PUBLIC = "instructions.key", "instructions.pub"


def open_instructions(folder: Path) -> Path:
    """Return the path of the public key; create the key pair if it doesn't exist."""
    key, public = folder / KEY, folder / PUBLIC
    if not key.exists() and not public.exists():
        write_pair(key, Ed25519PrivateKey.generate(), public)
    check_instructions(folder)
    return public


def check_instructions(folder: Path) -> str:
    """Check the key pair; return a description.

    Raise ``CommandError`` if a file is missing or invalid, the keys don't match, or other users can
    read the private key.
    """
    file, public = folder / KEY, folder / PUBLIC
    try:
        key = read_private_key(file)
        same = read_public_key(str(public)) == key.public_key()
    except (ConfigError, PolicyError) as error:
        raise CommandError(
            f"{error}: restore both {KEY} and {PUBLIC}; or remove both, run chambers site "
            f"coordinator again, and send every institution the new {PUBLIC}"
        ) from error
    if not same:
        raise CommandError(f"{public} is not the public half of {file}")
    if file.stat().st_mode & 0o077:
        raise CommandError(f"{file} can be read by other users: chmod 600 {file}")
    return f"{file} signs instructions; {public} is its public half"
