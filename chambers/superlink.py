"""A SuperLink that belongs to one run, and leaves nothing behind."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from chambers.errors import CommandError

_START_SECONDS = 120.0
_END_SECONDS = 15.0
_MARK = "CHAMBERS_SIMULATION"


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink.

    Attributes:
        address: host and port.
        environment: for commands that are to find it, and to end with it.
        log: the file with its output.

    """

    address: str
    environment: dict[str, str]
    log: Path


@contextmanager
def private_superlink(home: Path, simulated: bool = True) -> Iterator[SuperLink]:
    """Start a SuperLink on a free port of this machine, and end it with all its processes.

    Args:
        home: its FLWR_HOME; made if need be.
        simulated: it simulates its SuperNodes; else real ones connect to it.

    Raises:
        CommandError: it doesn't come up; the message has the end of its log.

    """
    home.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    mark = uuid.uuid4().hex
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Models that a run names are looked up on the hub; the library's own messages are not
        # what a person wants to read between rounds.
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        _MARK: mark,
    }
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "private"\n\n'
        f'[superlink.private]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    log = home / "superlink.log"
    command = [
        "flower-superlink",
        "--insecure",
        *(["--simulation"] if simulated else []),
        "--disable-runtime-dependency-installation",
        "--host=127.0.0.1",
        f"--port={port}",
    ]
    with log.open("wb") as output:
        # A session of its own, so that a Ctrl-C reaches this process alone, which ends the rest.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _await(port, process, log)
        yield SuperLink(f"127.0.0.1:{port}", environment, log)
    finally:
        _end(process, mark)


def run_app(
    app: Path,
    superlink: SuperLink,
    run_config: Mapping[str, str | int | float | bool],
    supernodes: int | None = None,
) -> str:
    """Run the app, streaming its log.

    Args:
        app: folder with the app's ``pyproject.toml``.
        superlink: where it runs.
        run_config: what differs from the app's own run config.
        supernodes: how many are simulated, with an actor each; None if they are real.

    Returns:
        ``"finished:completed"``, or the status and reason of a run that did not complete.

    Raises:
        CommandError: the SuperLink doesn't say how the run ended.

    """
    config = Path(superlink.environment["FLWR_HOME"]) / "run-config.toml"
    config.write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in run_config.items())
    )
    command = ["flwr", "run", str(app), "--stream", "--run-config", str(config)]
    if supernodes is not None:
        # Flower's default of 2 CPUs per client would make clients take turns on small machines.
        cpus = max(supernodes, os.cpu_count() or 1)
        command += [
            "--federation-config",
            f"num-supernodes={supernodes} client-resources-num-cpus=1 init-args-num-cpus={cpus}",
        ]
    started = subprocess.run(command, env=superlink.environment, check=False)
    if started.returncode != 0:
        return "not started"
    return _status(superlink)


def _status(superlink: SuperLink) -> str:
    """Ask for the run's real status: the stream's exit status says nothing about it."""
    listing = subprocess.run(
        ["flwr", "ls", "--format", "json"],
        env=superlink.environment,
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        raise CommandError(
            f"the SuperLink doesn't say how the run ended: {listing.stderr.strip()[-2000:]}"
        )
    run = json.loads(listing.stdout)["runs"][0]
    return str(run["status"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise CommandError(f"the SuperLink did not start:\n{log.read_text()[-2000:]}")


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End the SuperLink and whatever it started, Ray's daemons included."""
    left = _processes_of(mark)
    for other in left:
        with suppress(psutil.NoSuchProcess):
            other.terminate()
    _, alive = psutil.wait_procs(left, timeout=_END_SECONDS)
    # Something may have been started while the others ended.
    alive += [other for other in _processes_of(mark) if other not in alive]
    for other in alive:
        with suppress(psutil.NoSuchProcess):
            other.kill()
    psutil.wait_procs(alive, timeout=_END_SECONDS)
    process.wait(_END_SECONDS)


def _processes_of(mark: str) -> list[psutil.Process]:
    """Find the processes with the mark in their environment, and those of their sessions.

    Ray's agents write their title over their environment, and outlive their parents.
    """
    marked, sessions = [], set()
    everything = [other for other in psutil.process_iter() if other.pid != os.getpid()]
    for other in everything:
        with suppress(psutil.Error, OSError):
            if other.environ().get(_MARK) == mark:
                marked.append(other)
                sessions.add(os.getsid(other.pid))
    sessions.discard(os.getsid(0))
    for other in everything:
        with suppress(OSError):
            if other not in marked and os.getsid(other.pid) in sessions:
                marked.append(other)
    return marked
