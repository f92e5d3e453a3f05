"""A resident worker in a separate process, and messages for the worker."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.site_files import write_site

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class RunningWorker:
    """A worker's process, socket and log."""

    process: subprocess.Popen
    socket: Path
    log: Path

    def answered(self) -> int:
        """Return the number of train and evaluate messages that the worker has begun to answer."""
        return len(re.findall(r"is ready in", self.log.read_text()))

    def wait_until_it_answers(self, count: int) -> None:
        end = time.monotonic() + 300
        while self.answered() < count:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)


@contextmanager
def running_worker(folder: Path, data: Path, name: str = "alpha") -> Iterator[RunningWorker]:
    """Start ``chambers site worker`` for a site in ``folder``; wait until its socket exists."""
    socket, log = folder / "worker.sock", folder / "worker.log"
    write_site(folder, name, data, worker=socket)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chambers", "site", "worker", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 300
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield RunningWorker(process, socket, log)
    finally:
        process.kill()
        process.wait()
