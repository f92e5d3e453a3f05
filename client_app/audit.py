"""The audit log: an append-only local file that records all data leaving an institution.

Each reply and each lane is recorded on disk before any of its data is sent. Each line has a number
and the digest of the line before, so a changed, removed, inserted or moved line is noticed. Replies
tell the coordinator the number and the digest of their own line, so a shortened log is noticed too.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from flwr.app import Message

from federation.messages import ARRAYS, SUM, answers_of, config_of, from_arrays, metrics_of
from finetuning.aggregation.robust_aggregation import distance
from finetuning.errors import UserError

_LOCK_SECONDS = 60.0
_MAX_LINE_BYTES = 2**20
_COMPRESSED = {".bz2", ".gz", ".xz", ".zst"}
# The digest of the line before the first line of a log.
FIRST = "0" * 64


class AuditError(UserError, RuntimeError):
    """The audit log or the privacy account can't be written or read, so no data may be sent."""


@dataclass(frozen=True)
class AuditLog:
    """An audit log, which several processes may share.

    If logrotate moves the file, ``NAME.1``, ``NAME-20261231`` and so on in the same folder are its
    beginning. If one of them is compressed, and so can't be read, reading the log raises
    ``AuditError``: otherwise, lines would be numbered, and limits computed, without it.
    """

    path: Path
    title: str = "audit log"  # name of the file in error messages
    is_chained: bool = True  # whether lines have a number, and the digest of the line before

    def append(
        self,
        event: Mapping[str, Any],
        check: Callable[[Iterator[dict[str, Any]]], None] = lambda _: None,
    ) -> tuple[int, str]:
        """Append a line, wait until it is written to disk, and return its number and digest.

        The time is added to the line. ``check`` is called with the earlier lines, while other
        processes are locked out, and raises an error if the new line must not be written. If the
        line can't be written, raise ``AuditError``; no part of the line remains in the file.
        """
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **event}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Any user who can read the lock file could acquire the lock.
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS, mode=0o600):
                self.path.touch(mode=0o600)
                check(self.lines())
                return self._write(line)
        except OSError as error:
            raise AuditError(
                f"nothing leaves this site, because its {self.title} can't be written: "
                f"{error.strerror or error} ({error.filename or self.path})"
            ) from error

    def _write(self, line: dict[str, Any]) -> tuple[int, str]:
        with self.path.open("r+b", buffering=0) as file:
            # Drop a partial line: the data that it describes was never sent.
            start = max(0, file.seek(0, os.SEEK_END) - 2 * _MAX_LINE_BYTES)
            file.seek(start)
            tail = _whole_lines(file.read())
            end = start + len(tail)
            number = 0
            if self.is_chained:
                number, previous = self._end(tail)
                line = {"line": number + 1, "previous": previous, **line}
            data = json.dumps(line, ensure_ascii=False).encode()
            file.truncate(end)
            file.seek(end)
            try:
                written = file.write(data + b"\n")
                if written != len(data) + 1:
                    raise OSError("only a part of the line was written")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise
        return number + 1, digest_of_line(data)

    def _end(self, tail: bytes) -> tuple[int, str]:
        """Return the number and the digest of the last line; ``tail`` is the end of the file."""
        if not tail:
            earlier = self.files()[:-1]
            tail = _whole_lines(earlier[-1].read_bytes()) if earlier else b""
        last = tail.removesuffix(b"\n").rpartition(b"\n")[2]
        if not last:
            return 0, FIRST
        number = parse_line(last).get("line")
        if not isinstance(number, int):  # a damaged line
            number = sum(1 for _ in self.raw_lines())
        return number, digest_of_line(last)

    def files(self) -> list[Path]:
        """Return the log's files in their order: rotated ones, and the one that is written."""
        if not self.is_chained:
            return [self.path]
        moved = re.compile(re.escape(self.path.name) + r"[.-]\d[\d-]*")
        others = []
        for file in self.path.parent.glob("*"):
            is_compressed = file.suffix in _COMPRESSED
            if not moved.fullmatch(file.stem if is_compressed else file.name):
                continue
            if is_compressed:
                raise AuditError(
                    f"{file} is a part of the {self.title}, from which limits are computed: "
                    "decompress it, and configure logrotate not to compress this log"
                )
            others.append(file)
        return [*sorted(others, key=_first_number), self.path]

    def raw_lines(self) -> Iterator[bytes]:
        """Yield all complete lines of all files, without the line feeds."""
        for file in self.files():
            if file.exists():
                with file.open("rb") as lines:
                    yield from (line[:-1] for line in lines if line.endswith(b"\n"))

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all complete lines; for a damaged line, yield an empty dictionary."""
        return map(parse_line, self.raw_lines())


def digest_of_line(line: bytes) -> str:
    """Return the SHA-256 digest of a line without its line feed, in hexadecimal."""
    return hashlib.sha256(line).hexdigest()


def parse_line(line: bytes) -> dict[str, Any]:
    """Return a line's event; for a damaged line, return an empty dictionary."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _whole_lines(content: bytes) -> bytes:
    """Return content without a partial line at its end, which a power failure leaves behind."""
    return content[: content.rfind(b"\n") + 1]


def _first_number(file: Path) -> tuple[int, str]:
    with file.open("rb") as lines:
        number = parse_line(lines.readline(_MAX_LINE_BYTES)).get("line")
    return number if isinstance(number, int) else 0, file.name


def describe_reply(message: Message, reply: Message) -> dict[str, Any]:
    """Describe the content of a reply: names, sizes and norms, or the text of a problem."""
    config, arrays = config_of(reply), reply.content.array_records.get(ARRAYS)
    if "problem" in config:
        return {"problem": config["problem"]}
    content: dict[str, Any] = {"metrics": sorted(metrics_of(reply))}
    content |= {key: config[key] for key in ("base", "withheld") if key in config}
    if "digests" in config:
        content["digests"] = len(config["digests"])
    if answers := answers_of(reply):
        content["answers"] = len(answers)
    if arrays is None:
        return content
    content |= {
        "arrays": sorted(arrays),
        "array-bytes": sum(len(array.data) for array in arrays.values()),
    }
    if SUM in config:  # masked values have no norm; this line proves that they were sent
        sent = hashlib.sha256(b"".join(arrays[name].data for name in sorted(arrays)))
        return content | {SUM: config[SUM], "sha256": sent.hexdigest()}
    state = from_arrays(arrays)
    trained = message.metadata.message_type.partition(".")[0] == "train"
    received = from_arrays(message.content.array_records[ARRAYS]) if trained else {}
    norm = distance(state, received or dict.fromkeys(state, torch.zeros(())))
    # JSON can't represent infinite numbers and NaN.
    value = norm if math.isfinite(norm) else str(norm)
    return content | {"distance" if trained else "norm": value}
