"""``chambers site sign``: sign a release as a reviewer; the coordinator serves the signature."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.app_folder import app_files
from chambers.errors import CommandError, read_bytes
from chambers.site.host import TRUSTED, print_digests
from chambers.sources import argument, option


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Sign a release of the app that you have reviewed.

    \b
      chambers site sign --key ~/reviewer/key --output release
      chambers site sign chambers.chambers.0-1-0.1a2b3c4d.fab --key ~/reviewer/key --output release

    If there is no key yet, a new one is written, with a file trusted.yaml beside it, for the
    institutions that trust you. Anyone who has the key decides what runs there.

    RELEASE is a file made by flwr build: a zip archive with the code that runs at a site. Without
    RELEASE, a release is built from the installed version of Chambers; it is identical to the one
    that flwr build makes from a checkout of this version, with the same version of Flower. The
    release and a file with its signatures are written to the output folder; the coordinator serves
    both to the SuperLink as static files. Several reviewers can add signatures to one folder; a
    SuperNode needs only one signature, by a reviewer whom its institution trusts. The folder
    contains one release: signing a different one replaces the release and all signatures.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    release: Annotated[Path | None, argument("[RELEASE.fab]")] = None
    key: Annotated[Path, option("Your signing key; written if it is missing.", "FILE")]
    output: Annotated[Path, option("Folder for the release and its signatures.", "FOLDER")]
    url: Annotated[
        str, option("URL where the SuperLink finds FOLDER; default http://127.0.0.1:8002.", "URL")
    ] = "http://127.0.0.1:8002"

    def __call__(self) -> int:
        """Sign the release."""
        if not self.url.startswith(("http://", "https://")):
            raise CommandError(f"--url {self.url}: must begin with http:// or https://")
        from chambers.site.release import app_of, key_id, open_signing_key, publish, sign
        from federation.flower_internals import build_release

        content = read_bytes(self.release) if self.release else build_release(app_files())
        release = self.release or "the release of the installed chambers"
        app = app_of(content, release)
        new = not self.key.exists()
        key = open_signing_key(self.key)
        if new:
            print(f"{self.key}: a new signing key; keep it secret")
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
