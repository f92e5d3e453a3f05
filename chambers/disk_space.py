"""Free disk space, and the largest sender to the coordinator according to the proxy's log."""

import ipaddress
import re
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import psutil

# Sufficient for adapters and optimizer states of two rounds, checkpoints, and stored messages.
MIN_FREE_GIB = 5.0
# Paths relative to the coordinator's folder.
DATABASE = Path("database")
ACCESS_LOG = Path("proxy") / "access.log"
# Number of bytes to read from the end of the log: about 45,000 requests.
_MAX_BYTES = 4 * 2**20
# An accepted request, in nginx.conf's log format; unregistered senders get a status other than 200.
_LINE = re.compile(
    rb"(?m)^([0-9a-f.:]{2,45}) \[(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d)\] "
    rb'"POST /v1/fleet/[a-z-]+" 200 (\d{1,12}) \d+ [\d.]+\n'
)


def find_existing(path: Path) -> Path:
    """Return the path if it is a folder, else its nearest existing parent folder."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def free_gib(folder: Path) -> float:
    """Return the free space of a folder's file system in GiB."""
    return psutil.disk_usage(str(folder)).free / 2**30


def top_sender(log: Path) -> str:
    """Describe which address sent the most data to the SuperLink in the last hour.

    Only the end of a long log is read, so the period may be shorter than an hour.
    """
    now = time.time()
    sent, first = Counter[str](), now
    with log.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _MAX_BYTES))
        end = file.read(_MAX_BYTES)
    for parts in _LINE.finditer(end):
        try:
            moment = datetime.fromisoformat(parts[2].decode()).timestamp()
            address = str(ipaddress.ip_address(parts[1].decode()))
        except ValueError:
            continue
        if now - 3600 <= moment <= now + 1:
            sent[address] += int(parts[3])
            first = min(first, moment)
    if not sent:
        return "no address has sent anything in the last hour"
    ((address, most),) = sent.most_common(1)
    minutes = max(1, round((now - first) / 60))
    return (
        f"{address} has sent the most data in the last {minutes} min: {most / 1e6:,.1f} of "
        f"{sent.total() / 1e6:,.1f} MB"
    )
