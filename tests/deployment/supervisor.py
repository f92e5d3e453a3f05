"""A supervisor that kills a process of a deployment, and restarts programs that have ended."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread

import psutil

from tests.deployment.deployment import Deployment
from tests.deployment.program import DeploymentError, Program

# Restart programs repeatedly, because a SuperNode may be refused for up to 60 s.
RESTART_SECONDS = 15.0


@dataclass(frozen=True)
class Victim:
    """A process that is killed.

    Attributes:
        host: Name of the process's host.
        program: The program.
        child: Word in the command of the child process to kill; empty for the program itself.
        away: Seconds until the program may be started again.

    """

    host: str
    program: str
    child: str = ""
    away: float = RESTART_SECONDS


PROCESSES = {
    "SuperNode": Victim("court", "supernode"),
    "SuperExec of an institution": Victim("court", "superexec"),
    "ClientApp": Victim("court", "superexec", "flwr-clientapp"),
    "worker": Victim("court", "worker"),
    "SuperLink": Victim("coordinator", "superlink"),
    "SuperExec of the coordinator": Victim("coordinator", "superexec"),
    "ServerApp": Victim("coordinator", "superexec", "flwr-serverapp"),
    "proxy": Victim("coordinator", "proxy"),
    # Longer than Flower waits for a heartbeat of the ServerApp.
    "SuperLink, away for 100 s": Victim("coordinator", "superlink", away=100.0),
}


class Fault:
    """The end of a process; ``moment`` is negative until the process is killed."""

    def __init__(self) -> None:
        self.moment = -1.0


@contextmanager
def supervised(running: Deployment, process: str, moment: float) -> Iterator[Fault]:
    """Kill a process within the block, and restart programs that have ended.

    The process is killed after ``moment`` seconds, or once it runs after that time.
    """
    fault, over = Fault(), Event()

    def kill_and_restart() -> None:
        started = time.monotonic()
        if over.wait(moment):
            return
        victim = PROCESSES[process]
        program = running.programs[victim.host][victim.program]
        while not _kill(program, victim.child):
            if over.wait(0.05):
                return
        fault.moment = time.monotonic() - started
        back = time.monotonic() + victim.away
        while not over.wait(RESTART_SECONDS):
            start_again(running, without=program if time.monotonic() < back else None)

    thread = Thread(target=kill_and_restart)
    thread.start()
    try:
        yield fault
    finally:
        over.set()
        thread.join()
        start_again(running)


def start_again(running: Deployment, without: Program | None = None) -> None:
    """Start the programs that have ended, except for ``without``."""
    for programs in running.programs.values():
        for program in programs.values():
            if not program.running and program is not without:
                program.start()


def _kill(program: Program, child: str) -> bool:
    if not child:
        program.kill()
        return True
    for each in program.processes()[1:]:
        with suppress(psutil.NoSuchProcess):
            if any(child in word for word in each.cmdline()):
                each.kill()
                return True
    return False


def all_active(running: Deployment) -> bool:
    """Return whether the SuperLink answers and lists all institutions' SuperNodes as online."""
    try:
        listing = running.flwr("supernode", "ls", "deployment", "--format=json")
    except DeploymentError:
        return False
    online = [node for node in json.loads(listing).get("nodes", []) if node["status"] == "online"]
    return len(online) == len(running.institutions)


def left_running(running: Deployment) -> list[str]:
    """Return the processes that still run in the hosts' namespaces."""
    found = []
    for host in running.hosts.values():
        if host.namespace:
            pids = subprocess.run(
                ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
            ).stdout.split()
            for pid in pids:
                with suppress(psutil.NoSuchProcess):
                    found.append(" ".join(psutil.Process(int(pid)).cmdline())[:200])
    return found
