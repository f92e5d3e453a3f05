"""The list of groups, ``members.json``, which a reviewer signs.

A group takes part in a round whole or not at all. The file contains ``groups``, each of which maps
names to public keys (the content of ``peer.pub``), and ``signatures`` by the reviewer's key.
"""

import base64
import binascii
import hashlib
import json
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Self

import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from federation.authentication import parse_public_key
from federation.names import RULE, folded, is_name
from federation.sum_settings import MIN_GROUP
from finetuning.errors import UserError

_SIGNED = b"Chambers members 1\n"
_MAX_GROUP = 7  # of simulated clients; larger groups are more often incomplete


class SumError(UserError, ValueError):
    """A masked sum is impossible or refused; the message says why."""


class Members(BaseModel):
    """The groups of all institutions, by name, with their public keys in OpenSSH's format."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    groups: Annotated[list[dict[str, str]], Field(min_length=1)]
    signatures: dict[str, str] = {}  # in base64, by the id of the reviewer's key

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Self:
        names = [name for group in self.groups for name in group]
        if wrong := [name for name in names if not is_name(name)]:
            raise ValueError(f"the name {wrong[0]!r} {RULE}")
        if len(set(map(folded, names))) < len(names):
            raise ValueError("a name occurs twice (names are case-insensitive)")
        keys = [self.key_of(name).public_bytes_raw() for name in names]
        if len(set(keys)) < len(keys):
            raise ValueError("two institutions have the same key")
        if any(len(group) < MIN_GROUP for group in self.groups):
            raise ValueError(f"a group has fewer than {MIN_GROUP} institutions")
        return self

    def group_of(self, name: str) -> list[str]:
        """Return the sorted names of an institution's group; empty if it is in none."""
        return next((sorted(group) for group in self.groups if name in group), [])

    def key_of(self, name: str) -> Ed25519PublicKey:
        """Return an institution's public key; raise ``ValueError`` if it isn't one."""
        line = next(group[name] for group in self.groups if name in group)
        key = parse_public_key(line.encode())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError(f"the key of {name} is not the content of its peer.pub")
        return key

    @property
    def content(self) -> bytes:
        """What a reviewer signs: names and keys, without comments."""
        keys = [{n: self.key_of(n).public_bytes_raw().hex() for n in g} for g in self.groups]
        return _SIGNED + json.dumps(keys, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """SHA-256 digest of ``content``, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def is_signed_by(self, reviewers: Mapping[str, Ed25519PublicKey]) -> bool:
        """Return whether one of the reviewers, by the id of the key, has signed the list."""
        for identifier in self.signatures.keys() & reviewers.keys():
            try:
                signature = base64.b64decode(self.signatures[identifier], validate=True)
                reviewers[identifier].verify(signature, self.content)
                return True
            except (InvalidSignature, binascii.Error):
                continue
        return False


def read_members(file: Path) -> Members:
    """Read a list of groups; raise ``SumError`` if the file is missing or malformed."""
    try:
        return Members.model_validate_json(file.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise SumError(f"the list of groups {file} can't be read: {error.strerror}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        text = problem["msg"].removeprefix("Value error, ")
        raise SumError(f"the list of groups {file} is invalid: {where} {text}") from error


def read_reviewers(trusted: Path) -> dict[str, object]:
    """Return the keys in a site's trusted.yaml by their ids; None for what isn't a public key.

    Raise ``SumError`` if the file can't be read.
    """
    try:
        entities = yaml.safe_load(trusted.read_bytes())
    except OSError as error:
        raise SumError(f"{trusted} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SumError(f"{trusted} is not YAML: {error}") from error
    lines = entities.items() if isinstance(entities, dict) else ()
    return {str(name): parse_public_key(str(line).encode()) for name, line in lines}


def read_signed_members(file: Path, trusted: Path) -> Members:
    """Read a list of groups that a reviewer in ``trusted``, a site's trusted.yaml, has signed.

    Raise ``SumError`` if a file can't be read, or no such reviewer has signed the list.
    """
    members, keys = read_members(file), read_reviewers(trusted)
    if not members.is_signed_by({n: k for n, k in keys.items() if isinstance(k, Ed25519PublicKey)}):
        raise SumError(
            f"the list of groups {file} is not signed by a reviewer in {trusted}: get members.json "
            "from your reviewer, who signs it with chambers site sign --members"
        )
    return members


def form_groups(names: Collection[str]) -> list[list[str]]:
    """Return groups of simulated clients: one of up to 7, otherwise several of 4 to 7."""
    ordered = sorted(names)
    count = 1 if len(ordered) <= _MAX_GROUP else len(ordered) // 4
    return [ordered[i::count] for i in range(count)]
