"""The site file: an institution's TOML file with its name, its data, its policy and its worker.

The environment variable ``CHAMBERS_SITE`` names the file. The ClientApp also receives a node config
from Flower, but whoever has a task's token can replace that, so it decides nothing.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, PositiveInt, field_validator

from federation.names import RULE, is_name
from federation.run_config import Scalar
from federation.site_policy import (
    AbsolutePath,
    PolicyError,
    SitePolicy,
    Table,
    read_policy,
    read_table,
)

VARIABLE = "CHAMBERS_SITE"


class SiteFile(Table):
    """The content of a site file."""

    name: str = Field(description="The institution's name in every run.")
    data_path: AbsolutePath = Field(
        description="A file of training rows, or a folder with `train.jsonl` and, optionally, "
        "`test.jsonl` ([formats](training.md#data))."
    )
    policy: AbsolutePath = Field(
        "",
        description="The policy. Absent: no limits, and no audit log; text of rows isn't sent.",
    )
    worker: AbsolutePath = Field(
        "",
        description="Socket of the [resident worker](operations.md#run-a-resident-worker). Absent: "
        "there is none.",
    )

    rank: PositiveInt | None = Field(
        None,
        description='Rank of this institution\'s adapter in runs with `adapter.ranks = "site"`.',
    )

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not is_name(name):
            raise ValueError(RULE)
        return name


def read_site_file(path: Path) -> SiteFile:
    """Read a site file.

    Raise ``PolicyError`` if the file can't be read, is malformed, or can be changed by a user other
    than root and the one of this process. The same applies to the policy that it names.
    """
    if not path.is_absolute():
        raise PolicyError(f"{VARIABLE} = {str(path)!r} must be an absolute path")
    refuse_foreign(path)
    site = read_table(path, SiteFile, "the site file")
    if site.policy:
        refuse_foreign(Path(site.policy))
    return site


def read_own_policy(path: str) -> SitePolicy:
    """Read the policy of this institution.

    Raise ``PolicyError`` as `read_policy` does, and if other users can change a file with the
    public keys that verify instructions or lists of groups.
    """
    policy = read_policy(path)
    for file in filter(None, (policy.instruction_key, policy.sums.reviewers)):
        refuse_foreign(Path(file))
    return policy


def own_settings(node: Mapping[str, Scalar], deployed: bool) -> dict[str, Scalar]:
    """Return the settings of this node, with the keys of a site file that are set.

    ``node`` is Flower's node config, which is returned only in a simulation: if ``CHAMBERS_SITE``
    isn't set, and the process is not ``deployed``. Raise ``PolicyError`` if a deployed process has
    no site file, or it can't be used.
    """
    path = os.environ.get(VARIABLE, "")
    if path:
        return {k: v for k, v in read_site_file(Path(path)).model_dump(by_alias=True).items() if v}
    if deployed:
        raise PolicyError(
            f"the environment variable {VARIABLE} of this institution's SuperExec doesn't name the "
            "site file: chambers site join and update write site.toml and the units that name it"
        )
    return dict(node)


def refuse_foreign(path: Path) -> None:
    """Raise ``PolicyError`` if other users can change a file, or replace it in its folder."""
    for each in (path, path.parent):
        try:
            status = each.stat()
        except OSError as error:
            raise PolicyError(f"{each} can't be read: {error.strerror}") from error
        writable = stat.S_IWOTH
        if status.st_gid not in {0, os.getegid()}:
            writable |= stat.S_IWGRP
        if each.is_dir() and status.st_mode & stat.S_ISVTX:  # only a file's owner can replace it
            writable = 0
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & writable:
            raise PolicyError(
                f"other users can change {each}, which decides what may leave this institution: "
                f"chown it to root or the programs' user, and chmod go-w {each}"
            )
