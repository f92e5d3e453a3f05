"""``chambers site key`` and ``chambers site signing-key``: create keys for a site or a reviewer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.sources import argument


@dataclass(frozen=True)
class Key:
    """Write a node key, which authenticates this institution to the coordinator's SuperLink.

    \b
      chambers site key /srv/chambers/node

    The private key is written to FILE and stays at the institution. The public key is written to
    FILE.pub, for the coordinator to register.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    file: Annotated[Path, argument("FILE")]

    def __call__(self) -> int:
        """Write the key pair; refuse to overwrite existing files."""
        from cryptography.hazmat.primitives.asymmetric import ec

        from chambers.site.ssh_keys import write_pair

        # Flower reads only keys on NIST curves in OpenSSH format, without a passphrase.
        public = write_pair(self.file, ec.generate_private_key(ec.SECP384R1()))
        print(f"{self.file}: for flower-supernode --auth-supernode-private-key; keep it secret")
        print(f"{public}: send it to the coordinator, who registers it with")
        print(f"  flwr supernode register {public.name} deployment --name NAME")
        return 0


@dataclass(frozen=True)
class SigningKey:
    """Write a reviewer's key, for chambers site sign.

    \b
      chambers site signing-key ~/reviewer

    The private key is written to FILE and stays with the reviewer; the public key is written to
    FILE.pub. To trust the reviewer at a SuperNode, add the printed line to the file that is given
    to flower-supernode with --trusted-entities.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    file: Annotated[Path, argument("FILE")]

    def __call__(self) -> int:
        """Write the key pair; refuse to overwrite existing files."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from chambers.site.release import key_id
        from chambers.site.ssh_keys import public_line, write_pair

        key = Ed25519PrivateKey.generate()
        public = write_pair(self.file, key)
        print(f"{self.file}: for chambers site sign --key; keep it secret")
        print(f"{public}: the public key")
        print("line for the trusted.yaml of each site that trusts this reviewer:")
        print(f"{key_id(key)}: {json.dumps(public_line(key, self.file.name))}")
        return 0
