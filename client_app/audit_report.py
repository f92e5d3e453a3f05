"""Verify an audit log, and summarise what left the institution in each run."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from client_app.audit import FIRST, AuditLog, digest_of_line, parse_line

_SHOWN = 20


@dataclass
class RunAudit:
    """What one run did with an institution's rows, and what left the institution.

    Attributes:
        first, last: Times of the first and the last line about the run.
        rounds: Rounds with a reply to a train message.
        replies: Number of replies, refusals and errors included.
        array_bytes: Size of all adapters and importances that were sent.
        lane_bytes: Bytes that were sent over lanes, which are hidden states and gradients.
        lanes: Addresses of the block servers to which lanes were opened.
        rows: Smallest number of rows that were used for a message; None if none were.
        refusals: Number of replies that report a refusal or an error.
        epsilon: The total ε after the run's last round, for all runs on the same rows.
        models: Names of the base models, with their licences.
        base: Digests of the base models.
        purposes, agreements: The policy's, at the time of the run.

    """

    first: str = ""
    last: str = ""
    rounds: set[int] = field(default_factory=set)
    replies: int = 0
    array_bytes: int = 0
    lane_bytes: int = 0
    lanes: set[str] = field(default_factory=set)
    rows: int | None = None
    refusals: int = 0
    epsilon: float | None = None
    models: set[str] = field(default_factory=set)
    base: set[str] = field(default_factory=set)
    purposes: set[str] = field(default_factory=set)
    agreements: set[str] = field(default_factory=set)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a line of the log."""
        event, time = line.get("event"), str(line.get("time", ""))
        self.first, self.last = self.first or time, time
        for key, found in (("purpose", self.purposes), ("agreement", self.agreements)):
            if key in line:
                found.add(str(line[key]))
        if event == "accepted":
            if "rows" in line:
                self.rows = min(self.rows or line["rows"], line["rows"])
            if "model" in line:
                self.models.add(f"{line['model']} ({line['licence'] or 'no licence named'})")
        elif event == "privacy":
            self.epsilon = line["epsilon"]
        elif event == "lane":
            self.lanes.add(line["address"])
        elif event == "lane-closed":
            self.lane_bytes += line["bytes-up"]
        elif event == "reply":
            self.replies += 1
            self.refusals += "problem" in line
            self.array_bytes += line.get("array-bytes", 0)
            if "base" in line:
                self.base.add(line["base"])
            if line.get("kind") == "train" and "arrays" in line:
                self.rounds.add(line["round"])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {k: sorted(v) if isinstance(v, set) else v for k, v in asdict(self).items()}


@dataclass
class Audit:
    """The state of an audit log.

    Attributes:
        lines: Number of the last line; 0 if there is none.
        digest: Digest of the last line.
        refused: Number of messages that could not be authenticated, and so belong to no run.
        problems: What is wrong with the log.
        runs: What left, by run.

    """

    lines: int = 0
    digest: str = FIRST
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    runs: dict[str, RunAudit] = field(default_factory=dict)


def audit(log: AuditLog, recorded: Iterable[tuple[int, str]] = ()) -> Audit:
    """Verify a log's chain, and compare it with the lines that coordinators have recorded.

    ``recorded`` are numbers and digests of lines.
    """
    found, wanted, digests = Audit(), sorted(set(recorded)), {}
    numbers = {number for number, _ in wanted}
    for raw in log.raw_lines():
        line = parse_line(raw)
        _check(found, line)
        found.digest = digest_of_line(raw)
        if found.lines in numbers:
            digests[found.lines] = found.digest
        if "run" in line:
            with suppress(KeyError, TypeError):  # of a line that was changed
                found.runs.setdefault(str(line["run"]), RunAudit()).add(line)
        else:
            found.refused += line.get("event") == "refused"
    for number, digest in wanted:
        if number > found.lines:
            found.problems.append(
                f"a coordinator has recorded line {number}, but the log ends with line "
                f"{found.lines}: lines were removed, or the log was lost or restored"
            )
        elif digests.get(number) != digest:
            found.problems.append(
                f"a coordinator has recorded line {number} with another digest: the log was "
                "rewritten up to this line, or restored and continued"
            )
    if len(found.problems) > _SHOWN:
        found.problems[_SHOWN:] = [f"… and {len(found.problems) - _SHOWN} more problems"]
    return found


def _check(found: Audit, line: Mapping[str, Any]) -> None:
    """Compare a line with the line before, and make it the last line of ``found``."""
    before, number = found.lines, line.get("line")
    found.lines = number if isinstance(number, int) else before + 1
    if not isinstance(number, int):
        found.problems.append(f"the line after line {before} is damaged or was inserted")
    elif number != before + 1:
        found.problems.append(f"line {number} follows line {before}: lines are missing or moved")
    elif line.get("previous") != found.digest:
        found.problems.append(f"line {before} was changed: line {number} has another digest of it")
