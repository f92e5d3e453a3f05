"""A program on a host, which can be started, checked, stopped and killed."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from chambers.site.host import stream_module
from tests.deployment.compose import Service
from tests.deployment.hosts import Host

CHECKOUT = Path(__file__).resolve().parents[2]
_READY_SECONDS = 90.0
_STOP_SECONDS = 30.0


class DeploymentError(Exception):
    """A program or command of the deployment failed; the message contains its output."""


class Program:
    """A service of a Compose file, run as a process on a host.

    Attributes:
        host: Host that the program runs on.
        name: Name of the service.
        command: Program and arguments.
        view: Files and environment of the program and of its health check.
        log: File with the program's output since its first start.

    """

    def __init__(self, host: Host, service: Service) -> None:
        self.host = host
        self.name = service.name
        environment = {key: host.here(value) for key, value in service.view.environment.items()}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Threads of several processes wait for each other.
        environment["OMP_NUM_THREADS"] = "1"
        self.view = replace(service.view, environment=environment)
        self.log = host.folder / "logs" / f"{service.name}.log"
        self.log.parent.mkdir(exist_ok=True)
        words = [host.here(word) for word in service.command]
        self.command = [w.replace("daemon off;", f"{stream_module()}daemon off;") for w in words]
        self._health = [host.here(word) for word in service.health]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the program is running."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program; it need not be ready yet."""
        with self.log.open("ab") as log:
            self._process = self.host.start(self.command, self.view, log)

    def wait_until_ready(self) -> None:
        """Wait until the service's health check succeeds.

        Raises:
            DeploymentError: The program has ended, or isn't ready in time.

        """
        end = time.monotonic() + _READY_SECONDS
        said = ""
        while time.monotonic() < end and self.running:
            result = self.host.run(self._health, self.view)
            if result.returncode == 0:
                return
            said = result.stdout
            time.sleep(0.5)
        raise DeploymentError(f"{self} is not ready: {said[-500:]}\n{self.output()[-2000:]}")

    def processes(self) -> list[psutil.Process]:
        """Return the program's process and all processes that it has started."""
        if not self.running:
            return []
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def stop(self) -> None:
        """End the program as ``docker stop`` and systemd do: with SIGTERM, then with SIGKILL."""
        processes = self.processes()
        if processes:
            with suppress(psutil.NoSuchProcess):
                processes[0].terminate()
            psutil.wait_procs(processes[:1], timeout=_STOP_SECONDS)
            self._end(processes)

    def kill(self) -> None:
        """Kill the program and the processes that it has started, as a container's end does."""
        self._end(self.processes())

    def output(self) -> str:
        """Return the program's output since its first start."""
        return self.log.read_text(errors="replace")

    def __str__(self) -> str:
        return f"{self.name} of {self.host.name}"

    def _end(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_STOP_SECONDS)
        if self._process is not None:
            self._process.wait(_STOP_SECONDS)


@contextmanager
def other_program(superexec: Program, folder: Path, name: str, *arguments: str) -> Iterator[None]:
    """Make a SuperExec start a Python program in place of Flower's.

    Args:
        superexec: The SuperExec, which is restarted.
        folder: Folder for the script that is started.
        name: Name of Flower's program.
        arguments: File of the Python program, and its first arguments.

    """
    own, script = superexec.view, folder / name
    command = shlex.join([sys.executable, *arguments])
    script.write_text(f'#!/bin/sh\nPYTHONPATH={CHECKOUT} exec {command} "$@"\n')
    script.chmod(0o755)
    path = f"{folder}{os.pathsep}{own.environment['PATH']}"
    superexec.stop()
    superexec.view = replace(own, environment=own.environment | {"PATH": path})
    superexec.start()
    try:
        yield
    finally:
        superexec.stop()
        superexec.view = own
        superexec.start()
