"""Read the keys for signing and verifying the coordinator's instructions (OpenSSH format)."""

from logging import WARNING
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common import log
from flwr.serverapp import Grid

from federation.authentication import Signer
from federation.flower_internals import HttpGrid
from federation.run_config import UNSIGNED, ConfigError, RunConfig
from federation.site_policy import PolicyError


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
    return Signer(read_private_key(Path(config.instruction_key).expanduser()))


def read_private_key(file: Path) -> Ed25519PrivateKey:
    """Read the coordinator's private key.

    Raise ``ConfigError`` if the file can't be read, or isn't an Ed25519 key without a passphrase.
    """
    key: object = None
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(
            f"instruction-key = {str(file)!r} can't be read: {error.strerror}"
        ) from error
    except (TypeError, ValueError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
        pass
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
    key: object = None
    try:
        key = load_ssh_public_key(Path(file).read_bytes())
    except OSError as error:
        raise PolicyError(
            f"the site's policy names instruction-key = {file!r}, which can't be read: "
            f"{error.strerror}"
        ) from error
    except (ValueError, UnsupportedAlgorithm):
        pass
    if not isinstance(key, Ed25519PublicKey):
        raise PolicyError(
            f"the site's policy names instruction-key = {file!r}, which is not an Ed25519 public "
            "key in OpenSSH's format; name a copy of the coordinator's instructions.pub"
        )
    return key
