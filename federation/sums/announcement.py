"""Announcements: what a member of a group states about itself for a run, signed with its key."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from federation.sum_settings import MIN_GROUP
from federation.sums.members import Members, SumError

# Names of the records with a client's announcement, and with all announcements of its group.
ANNOUNCEMENT, GROUP = "announcement", "group"
NO_MEMBERS = hashlib.sha256().hexdigest()  # the digest of the list of groups in simulation
_SIGNED = b"Chambers sum key 1\n"
_DIGEST = Field(pattern="^[0-9a-f]{64}$")


class Statement(BaseModel):
    """What a client announces."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    lineage: str  # the run and its resumptions
    name: str
    members: str = _DIGEST  # digest of the client's list of groups; in simulation, of nothing
    key: str = _DIGEST  # X25519 public key for this run, in hexadecimal
    rows: int = Field(gt=0)  # number of training rows, |Dᵢ| in FedJudge Eq. 2
    only: bool  # whether the client sends nothing unmasked
    evaluates: bool  # whether the client's policy allows losses in sums
    importance: bool  # whether the client's policy allows importance J in sums


@dataclass(frozen=True)
class Announcement:
    """A statement as it was signed; in simulation, the signature is empty."""

    text: bytes
    signature: bytes

    @classmethod
    def sign(cls, statement: Statement, key: Ed25519PrivateKey | None) -> "Announcement":
        """Sign a statement; without a key, as in simulation, leave the signature empty."""
        text = statement.model_dump_json().encode()
        return cls(text, key.sign(_SIGNED + text) if key else b"")

    @cached_property
    def statement(self) -> Statement:
        """The statement; raise ``SumError`` if it is malformed."""
        try:
            return Statement.model_validate_json(self.text)
        except ValidationError as error:
            raise SumError("an announcement is malformed") from error

    def verify(self, members: Members) -> None:
        """Raise ``SumError`` unless the named member has signed this for this list of groups."""
        name = self.statement.name
        if self.statement.members != members.digest:
            raise SumError(f"the announcement of {name} is for another list of groups")
        try:
            members.key_of(name).verify(self.signature, _SIGNED + self.text)
        except InvalidSignature as error:
            raise SumError(f"the announcement is not signed with the key of {name}") from error

    def to_record(self) -> ConfigRecord:
        """Return the announcement as a ConfigRecord."""
        return group_record([self])


def group_record(announcements: Sequence[Announcement]) -> ConfigRecord:
    """Return announcements as a ConfigRecord."""
    return ConfigRecord(
        {
            "text": [each.text for each in announcements],
            "signature": [each.signature for each in announcements],
        }
    )


def announcements_of(record: Mapping[str, Any] | None) -> list[Announcement]:
    """Read announcements from a record; raise ``SumError`` if it is missing or malformed."""
    columns = [(record or {}).get(key) for key in ("text", "signature")]
    if not all(
        isinstance(column, list) and all(isinstance(value, bytes) for value in column)
        for column in columns
    ):
        raise SumError("the message has no announcements of a group")
    texts, signatures = columns
    if len(texts) != len(signatures):  # type: ignore[arg-type]
        raise SumError("the message's announcements are malformed")
    return [Announcement(*pair) for pair in zip(texts, signatures, strict=True)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Group:
    """The announcements of a group, by name in sorted order; `check_group` checks them."""

    announcements: Mapping[str, Announcement]

    @property
    def rows(self) -> dict[str, int]:
        """Numbers of training rows by name."""
        return {name: each.statement.rows for name, each in self.announcements.items()}

    @property
    def evaluates(self) -> bool:
        """Whether the group sends losses, which needs the consent of all members."""
        return all(each.statement.evaluates for each in self.announcements.values())

    @property
    def importance(self) -> bool:
        """Whether the group sends importance J, which needs the consent of all members."""
        return all(each.statement.importance for each in self.announcements.values())


def check_group(
    announcements: Sequence[Announcement],
    own: str,
    lineage: str,
    members: Members | None,
    min_size: int = MIN_GROUP,
) -> Group:
    """Return the group of the client ``own``; raise ``SumError`` if masks could reveal its update.

    Without ``members``, as in simulation, nobody has signed which clients form a group.
    """
    by_name = {each.statement.name: each for each in announcements}
    names = sorted(by_name)
    if len(names) < len(announcements):
        raise SumError("a member of the group is named twice")
    if members is None:
        if own not in names:
            raise SumError(f"the group lacks {own} itself")
    elif names != members.group_of(own):
        missing = ", ".join(sorted({*members.group_of(own)} ^ {*names}))
        raise SumError(f"the group differs from the one in the list of groups: {missing}")
    if len(names) < min_size:
        raise SumError(f"the group has {len(names)} members, but at least {min_size} are needed")
    for name, announcement in by_name.items():
        if members is not None:
            announcement.verify(members)
        if announcement.statement.lineage != lineage:
            raise SumError(f"the announcement of {name} is for another run")
        if not announcement.statement.only:
            raise SumError(
                f"{name} also sends unmasked adapters (sums.only), which could be subtracted"
            )
    if len({each.statement.key for each in announcements}) < len(names):
        raise SumError("two members of the group have the same key")
    return Group({name: by_name[name] for name in names})
