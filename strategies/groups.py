"""The groups of masked sums, which take part in a round whole or not at all."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from federation.flower_internals import HttpGrid
from federation.run_config import ConfigError, RunConfig
from federation.sums.announcement import ANNOUNCEMENT, Announcement, Group, announcements_of
from federation.sums.members import SumError, form_groups, read_members


def announcement_of(reply: Message, name: str) -> Announcement | None:
    """Return the announcement in a client's reply to a query, or None; its group will check it."""
    record = reply.content.config_records.get(ANNOUNCEMENT)
    if record is None:
        return None
    with suppress(SumError):
        (announcement,) = announcements_of(record)
        if announcement.statement.name == name:
            return announcement
    return None


def require_members(config: RunConfig, grid: Grid) -> None:
    """Raise ``ConfigError`` if a deployed run sums adapters without a list of groups."""
    if config.sums.enabled and isinstance(grid, HttpGrid) and not config.sums.members:
        raise ConfigError(
            "sums.enabled = true needs sums.members in a deployment: the absolute path of "
            "members.json, which the reviewer signs with chambers site sign --members"
        )


def groups_of(config: RunConfig, names: Collection[str]) -> list[list[str]]:
    """Return the sorted names of each group: those in ``sums.members``, else formed of ``names``.

    Raise ``SumError`` if the file can't be read.
    """
    if not config.sums.members:
        return form_groups(names)
    members = read_members(Path(config.sums.members).expanduser())
    return [sorted(group) for group in members.groups]


def complete_groups(
    groups: Collection[list[str]],
    connected: set[str],
    announced: Mapping[str, Announcement],
    agreed: Mapping[str, int],
) -> tuple[dict[str, Group], dict[str, str]]:
    """Return the complete groups by member, and why other clients can't take part, by name.

    ``announced`` are the announcements of the drawn clients, and ``agreed`` the agreed numbers of
    rows.
    """
    absent = {
        name: f"it announces more than the {rows} rows that are agreed on"
        for name, rows in agreed.items()
        if name in announced and announced[name].statement.rows > rows
    }
    for name in connected - {name for names in groups for name in names}:
        absent[name] = "it is in no group of sums.members"
    usable = announced.keys() - absent.keys()
    complete: dict[str, Group] = {}
    for names in groups:
        if usable >= set(names):
            group = Group({name: announced[name] for name in names})
            complete |= dict.fromkeys(names, group)
        elif not connected >= set(names) or announced.keys() & set(names):  # else it wasn't drawn
            missing = [name for name in names if name not in connected]
            missing = missing or [name for name in names if name not in usable]
            reason = f"its group is incomplete: {', '.join(missing)} can't take part"
            absent = dict.fromkeys(connected & set(names), reason) | absent
    return complete, absent
