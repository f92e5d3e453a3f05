"""``chambers site sign``: sign a release, or a list of groups, as a reviewer."""

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.app_folder import app_files
from chambers.errors import CommandError, read_bytes
from chambers.site.host import TRUSTED, print_digests
from chambers.sources import argument, option
from finetuning.files import write_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Sign a release of the app that you have reviewed.

    \b
      chambers site sign --key ~/reviewer/key --output release
      chambers site sign chambers.chambers.0-1-0.1a2b3c4d.fab --key ~/reviewer/key --output release
      chambers site sign --members members.json --key ~/reviewer/key

    If there is no key yet, a new one is written, with a file trusted.yaml beside it, for the
    institutions that trust you. Anyone who has the key decides what runs there.

    RELEASE is a file made by flwr build: a zip archive with the code that runs at a site. Without
    RELEASE, a release is built from the installed version of Chambers; it is identical to the one
    that flwr build makes from a checkout of this version, with the same version of Flower. The
    release and a file with its signatures are written to the output folder; the coordinator serves
    both to the SuperLink as static files. Several reviewers can add signatures to one folder; a
    SuperNode needs only one signature, by a reviewer whom its institution trusts. The folder
    contains one release: signing a different one replaces the release and all signatures.

    With --members, sign the groups of institutions for masked sums (docs/masked-sums.md) instead.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    release: Annotated[Path | None, argument("[RELEASE.fab]")] = None
    key: Annotated[Path, option("Your signing key; written if it is missing.", "FILE")]
    output: Annotated[
        Path | None, option("Folder for the release and its signatures.", "FOLDER")
    ] = None
    members: Annotated[
        Path | None, option("List of groups to sign, in this file, instead of a release.", "FILE")
    ] = None
    url: Annotated[
        str, option("URL where the SuperLink finds FOLDER; default http://127.0.0.1:8002.", "URL")
    ] = "http://127.0.0.1:8002"

    def __call__(self) -> int:
        """Sign the release, or the list of groups."""
        if self.members:
            return self._sign_members(self.members)
        if not self.output:
            raise CommandError("name a folder with --output, or a list of groups with --members")
        if not self.url.startswith(("http://", "https://")):
            raise CommandError(f"--url {self.url}: must begin with http:// or https://")
        from chambers.site.release import app_of, key_id, publish, sign
        from federation.flower_internals import build_release

        content = read_bytes(self.release) if self.release else build_release(app_files())
        release = self.release or "the release of the installed chambers"
        app = app_of(content, release)
        key = self._open_key()
        signers = publish(
            folder=self.output, content=content, verification=sign(content, key), url=self.url
        )
        print(f"{release}: signed by {key_id(key)}")
        names = ", ".join(signers)
        print(f"{self.output}: {app}, signed by {names}; give this folder to the coordinator")
        trusted = self.key.with_name(TRUSTED)
        if trusted.exists():
            print(f"send {trusted} to every institution that trusts you, and read out to it:")
            print_digests(trusted)
        return 0

    def _open_key(self) -> "Ed25519PrivateKey":
        from chambers.site.release import open_signing_key

        new = not self.key.exists()
        key = open_signing_key(self.key)
        if new:
            print(f"{self.key}: a new signing key; keep it secret")
        return key

    def _sign_members(self, file: Path) -> int:
        from chambers.site.release import key_id
        from federation.sums.members import read_members

        members, key = read_members(file), self._open_key()
        signature = base64.b64encode(key.sign(members.content)).decode()
        signatures = members.signatures | {key_id(key): signature}
        signed = members.model_copy(update={"signatures": signatures})
        write_file(file, signed.model_dump_json(indent=1) + "\n")
        print("compare each member's key with the digest that sha256sum peer.pub prints there:")
        for number, group in enumerate(members.groups, start=1):
            for name, line in sorted(group.items()):
                digest = hashlib.sha256(f"{line.strip()}\n".encode()).hexdigest()
                print(f"  group {number}: {name:20} {digest}")
        print(f"{file}: signed by {key_id(key)}; send it to every member and to the coordinator")
        return 0
