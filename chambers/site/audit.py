"""``chambers site audit`` and ``used``: what left an institution, and what a row was used for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument, option

if TYPE_CHECKING:
    from client_app.audit_report import RunAudit
    from federation.site_policy import SitePolicy

_RECORD = option(
    "What a coordinator has recorded: metrics.jsonl of a run, or the run's folder; repeatable.",
    "FILE",
)


@dataclass(frozen=True)
class Audit:
    """Verify the audit log, and print what left this institution in each run.

    The log alone shows lines that were changed, removed, inserted or moved. Lines that are missing
    at its end, or a log that was replaced, are found with --record. The exit status is 0 only if
    nothing is wrong.
    """

    record: Annotated[list[Path] | None, _RECORD] = None
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Print what is wrong, and a paragraph for each run."""
        from client_app.audit import AuditLog
        from client_app.audit_report import audit

        name, policy = open_policy(self.folder)
        recorded = [each for file in self.record or () for each in read_record(file, name)]
        if not policy.audit_file.exists() and not recorded:
            raise CommandError(f"{policy.audit_file} doesn't exist: no message has arrived yet")
        found = audit(AuditLog(policy.audit_file), recorded)
        for run, about in found.runs.items():
            print(f"run {run}\n" + "".join(f"  {line}\n" for line in describe(about)))
        if found.refused:
            print(f"{found.refused} messages were not authentic, and refused\n")
        for problem in found.problems:
            print(f"fix  {policy.audit_file}: {problem}")
        compared = f", and equals {len(recorded)} recorded lines" if recorded else ""
        if not found.problems:
            print(f"ok   {found.lines} lines; the last has the digest {found.digest}{compared}")
        return 1 if found.problems else 0


@dataclass(frozen=True)
class Used:
    """Print in which runs and rounds the rows of a file were used, row by row.

    FILE has rows as in the training data, for example those of a person who asks. Only this
    institution can answer: the ledger's key never leaves it.
    """

    file: Annotated[Path, argument("FILE")]
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Print a line for each row and run."""
        from client_app.row_ledger import digest_of_row, find_uses
        from finetuning.data.formats import read_values

        file = self.file.absolute()
        _, policy = open_policy(self.folder)
        rows = dict(read_values(file))
        for origin, value in rows.items():
            if not isinstance(value, dict):
                raise CommandError(f"{origin} is not a row: {value}")
        uses = find_uses(policy, map(digest_of_row, rows.values()))
        for origin, found in zip(rows, uses, strict=True):
            if not found:
                print(f"{origin}: not used")
            for run, use in found.items():
                kinds = (f"{kind} in rounds {_numbers(each)}" for kind, each in use.items())
                print(f"{origin}: run {run}: {'; '.join(kinds)}")
        return 0


def open_policy(folder: Path) -> "tuple[str, SitePolicy]":
    """Return an institution's name and policy, after changing to its folder and user."""
    from federation.site_file import read_site_file
    from federation.site_policy import read_policy

    folder = folder.absolute()
    host.enter(folder)
    site = read_site_file(folder / host.SITE)
    if not site.policy:
        raise CommandError(f"{folder / host.SITE} names no policy, so there is no audit log")
    return site.name, read_policy(site.policy)


def read_record(path: Path, client: str) -> list[tuple[int, str]]:
    """Return the lines of an institution's audit log that a coordinator has recorded in a run."""
    from federation.run_folder import METRICS_FILE, read_events

    file = path / METRICS_FILE if path.is_dir() else path
    if not file.exists():
        raise CommandError(f"--record: {file} doesn't exist")
    events = [event for event in read_events(file) if event["event"] == "audit"]
    own = [(event["line"], event["digest"]) for event in events if event["client"] == client]
    if not own:
        raise CommandError(f"--record: {file} has no line of the audit log of {client}")
    return own


def describe(run: "RunAudit") -> list[str]:
    """Return lines of text about what left in a run."""
    lines = [
        f"from {run.first} to {run.last}",
        f"{run.replies} replies, of which {run.refusals} are refusals or errors",
        f"adapters in rounds {_numbers(run.rounds)}: {run.array_bytes / 1e6:.1f} MB",
    ]
    if run.lanes:
        lanes = ", ".join(sorted(run.lanes))
        lines.append(f"lanes to {lanes}: {run.lane_bytes / 1e6:.1f} MB")
    if run.rows is not None:
        lines.append(f"computed from at least {run.rows} rows")
    if run.epsilon is not None:
        lines.append(f"total ε on these rows at its end: {run.epsilon:.3g}")
    lines += [f"purpose: {each}" for each in sorted(run.purposes)]
    return lines + [f"agreement: {each}" for each in sorted(run.agreements)]


def _numbers(rounds: set[int]) -> str:
    return ", ".join(map(str, sorted(rounds))) or "none"
