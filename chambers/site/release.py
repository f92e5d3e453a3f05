"""Signed releases of the app, in the format of Flower's hub.

The SuperLink sends ``POST {FLWR_SUPERGRID_API_URL}/hub/fetch-fab``. The answer contains the URL of
the release and the signatures, which the SuperLink forwards to the SuperNodes. SuperNodes with
``--trusted-entities`` verify the signatures (``flwr.supernode.start_client_internal``).
"""

import base64
import hashlib
import json
import time
import zipfile
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ValidationError

from chambers.errors import CommandError, read_bytes
from chambers.site.host import TRUSTED
from chambers.site.keys import public_line, write_pair
from federation.authentication import parse_private_key
from finetuning.files import write_file

ANSWER = "fetch-fab.json"


class Verification(BaseModel):
    """A signature of a release."""

    public_key_id: str  # id of the signer's key in a site's trusted entities
    signed_at: int  # Unix time in seconds
    # Ed25519 signature of the time (8 bytes, big endian) and the release's SHA-256 digest, in
    # base64url without padding.
    signature: str


class HubAnswer(BaseModel):
    """The answer to Flower's ``fetch-fab``."""

    fab_url: str
    verifications: list[Verification]


def key_id(key: Ed25519PrivateKey) -> str:
    """Return the id of a key in files of trusted entities, derived from the public key."""
    return f"fpk_{hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest()[:16]}"


def open_signing_key(file: Path) -> Ed25519PrivateKey:
    """Read a reviewer's key; raise ``CommandError`` if the file isn't one.

    If there is no such file, write a new key. If ``trusted.yaml`` for institutions is missing
    beside it, write that, too.
    """
    trusted = file.with_name(TRUSTED)
    if not file.exists():
        if trusted.exists():
            raise CommandError(f"{file} is missing, but {trusted} exists: use another folder")
        write_pair(file, Ed25519PrivateKey.generate())
    key = parse_private_key(read_bytes(file))
    if not isinstance(key, Ed25519PrivateKey):
        raise CommandError(
            f"{file} is not a signing key without a passphrase; chambers site sign makes one"
        )
    if not trusted.exists():  # an earlier command may have been interrupted
        line = public_line(key.public_key(), file.name)
        write_file(trusted, f"{key_id(key)}: {json.dumps(line.strip())}\n")
    return key


def app_of(content: bytes, origin: Path | str) -> str:
    """Return the name and version of a release in Flower's format, ``@publisher/name==1.2.3``.

    Raise ``CommandError``, which names ``origin``, if ``content`` isn't a release or is too large.
    """
    from federation.flower_internals import FAB_MAX_SIZE, get_fab_config, get_metadata_from_config

    if len(content) > FAB_MAX_SIZE:
        raise CommandError(f"{origin} has {len(content)} bytes; at most {FAB_MAX_SIZE} are allowed")
    try:
        name, version = get_metadata_from_config(get_fab_config(content))
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"{origin} is not a release made by flwr build: {error}") from error
    return f"@{name}=={version}"


def sign(content: bytes, key: Ed25519PrivateKey) -> Verification:
    """Sign a release."""
    now = int(time.time())
    signature = key.sign(now.to_bytes(8, "big") + hashlib.sha256(content).digest())
    text = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    return Verification(public_key_id=key_id(key), signed_at=now, signature=text)


def publish(folder: Path, content: bytes, verification: Verification, url: str) -> list[str]:
    """Add a release and its signature to the served folder, and remove other releases.

    Return the ids of the release's signing keys; raise ``CommandError`` if a file is malformed.
    """
    file, answer_file = folder / f"{hashlib.sha256(content).hexdigest()}.fab", folder / ANSWER
    by_key = {}
    if answer_file.exists():
        try:
            older = HubAnswer.model_validate_json(read_bytes(answer_file))
        except ValidationError as error:
            raise CommandError(
                f"{answer_file} has no valid signatures of the release in its folder; delete "
                f"{folder} and sign the release again"
            ) from error
        if older.fab_url.endswith(file.name):
            by_key = {signed.public_key_id: signed for signed in older.verifications}
    by_key[verification.public_key_id] = verification
    write_file(file, content)
    answer = HubAnswer(
        fab_url=f"{url.rstrip('/')}/{file.name}", verifications=list(by_key.values())
    )
    write_file(answer_file, answer.model_dump_json(indent=1) + "\n")
    for release in folder.glob(f"{'[0-9a-f]' * 64}.fab"):
        if release != file:
            release.unlink()
    return list(by_key)
