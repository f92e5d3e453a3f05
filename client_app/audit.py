"""The audit log: an append-only local file that records all data leaving an institution.

Each reply and each lane is recorded on disk before any of its data is sent.
"""

import hashlib
import json
import math
import os
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


class AuditError(UserError, RuntimeError):
    """The audit log or the privacy account can't be written, so no data may be sent."""


@dataclass(frozen=True)
class AuditLog:
    """An audit log, which several processes may share."""

    path: Path
    title: str = "audit log"  # name of the file in error messages

    def append(
        self,
        event: Mapping[str, Any],
        check: Callable[[Iterator[dict[str, Any]]], None] = lambda _: None,
    ) -> None:
        """Append a line, and wait until it is written to disk.

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
                self._write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise AuditError(
                f"nothing leaves this site, because its {self.title} can't be written: "
                f"{error.strerror or type(error).__name__}"
            ) from error

    def _write(self, data: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            # Drop a partial line after a power failure: the data that it describes was never sent.
            start = max(0, file.seek(0, os.SEEK_END) - _MAX_LINE_BYTES)
            file.seek(start)
            end = start + file.read().rfind(b"\n") + 1
            file.truncate(end)
            file.seek(end)
            try:
                written = file.write(data)
                if written != len(data):
                    raise OSError("only a part of the line was written")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield all complete lines; for a damaged line, yield an empty dictionary."""
        if not self.path.exists():
            return
        with self.path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    event = {}
                yield event if isinstance(event, dict) else {}


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
