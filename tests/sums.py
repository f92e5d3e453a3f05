"""Groups for masked sums: peers' keys, a list of groups that a reviewer has signed, and uploads."""

import base64
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from chambers.site.keys import open_peer_key
from chambers.site.release import key_id, open_signing_key
from federation.sums.members import Members


def sign_members(folder: Path, *groups: list[str]) -> Path:
    """Write ``members.json``, ``trusted.yaml``, and each member's key ``NAME-peer``.

    Args:
        folder: Folder for the files; keys that exist are used again.
        groups: Names of the members of each group.

    """
    keys = [{n: open_peer_key(folder / f"{n}-peer").read_text() for n in group} for group in groups]
    key = open_signing_key(folder / "key")
    members = Members(groups=keys)
    signatures = {key_id(key): base64.b64encode(key.sign(members.content)).decode()}
    file = folder / "members.json"
    file.write_text(members.model_copy(update={"signatures": signatures}).model_dump_json())
    return file


def sums_policy(folder: Path, name: str, only: bool = True) -> str:
    """Return the table ``[sums]`` of a member's policy.

    Args:
        folder: The folder of ``sign_members``.
        name: Name of the member.
        only: Whether the member refuses runs without masked sums.

    """
    return (
        f"[sums]\nonly = {str(only).lower()}\nmembers = '{folder}/members.json'\n"
        f"reviewers = '{folder}/trusted.yaml'\nkey = '{folder}/{name}-peer'\nmax-share = 0.75\n"
    )


def looks_uniform(arrays: Iterable[np.ndarray]) -> bool:
    """Return whether the bytes of arrays have the frequencies of random bytes (chi-square)."""
    data = np.concatenate([np.ascontiguousarray(a).view(np.uint8).ravel() for a in arrays])
    counts = np.bincount(data, minlength=256)
    expected = len(data) / 256
    return bool(((counts - expected) ** 2 / expected).sum() < 255 + 8 * (2 * 255) ** 0.5)
