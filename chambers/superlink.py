"""Run the app on a private SuperLink, and end all of the SuperLink's processes afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tomli_w

from chambers.environment import make_child_environment, short_path
from chambers.errors import END_SIGNALS, CommandError
from federation.run_config import Scalar
from federation.run_folder import LINK

COMPLETED = "finished:completed"
# Link in the FLWR_HOME of a SuperLink to the folder of its most recent run.
RUN_LINK = "run-folder"
_FAILED = "Simulation failed with exception: "
# Status details of a failed run if Flower reports the reason only in the log.
_UNSAID = {"", "N/A", "An error was encountered. Ending simulation."}
_CHAINED = re.compile(r"\n\n(?:The above exception was|During handling of the above)")
_END_SECONDS = 15.0
MARK = "CHAMBERS_PROCESSES"  # environment variable that marks the processes of one command
_COLOUR = re.compile(r"\x1b\[\d+m")
# Start of a record in the log of Flower or uvicorn.
_RECORD = re.compile(r"^(?:\S+ )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) ?(?::|\[)", re.MULTILINE)


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink."""

    address: str  # host and port
    environment: dict[str, str]  # for commands that use the SuperLink and that end with it
    log: Path  # file with its output, if it exists
    connection: str = "private"  # Flower's name of the connection


@contextmanager
def private_superlink(home: Path, simulated: bool = True) -> Iterator[SuperLink]:
    """Start a SuperLink on a free local port; on exit, end it and all its processes.

    ``home``, created if missing, is FLWR_HOME. Unless ``simulated``, SuperNodes can connect. Raise
    ``CommandError``, with the end of the SuperLink's log, if the SuperLink doesn't start.
    """
    # Python imports modules from the working folder, so it must not be the user's.
    work, temporary = home / "work", home / "tmp"
    for folder in (work, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    port, mark = free_port(), uuid.uuid4().hex
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
    with ExitStack() as stack:
        environment = make_child_environment(stack.enter_context(short_path(temporary))) | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Otherwise, messages of these libraries would appear in the output of the run.
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            MARK: mark,
            LINK: str(home / RUN_LINK),
        }
        with log.open("wb") as output:
            # Use a separate session, so that Ctrl-C reaches only this process, which ends others.
            process = subprocess.Popen(
                command,
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        stack.callback(process.wait, _END_SECONDS)
        stack.callback(end_processes, mark)
        _await(port, process, log)
        yield SuperLink(f"127.0.0.1:{port}", environment, log)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def run_app(
    app: Path | str,
    superlink: SuperLink,
    run_config: Mapping[str, Scalar],
    supernodes: int | None = None,
    resources: str = "",
    write: Callable[[bytes], None] = _print,
) -> str:
    """Run the app in a folder, or a release, and call ``write`` with each line of its log.

    ``run_config`` contains the settings that differ from the app's run config. ``supernodes`` is
    the number of simulated SuperNodes, and ``resources`` are those of their actors, as options of
    Flower. If ``supernodes`` is None, connected SuperNodes take part.

    Return ``"finished:completed"``, or the status of a run that did not complete, followed by a
    colon and the reason. Raise ``CommandError`` if the SuperLink doesn't report how the run ended.
    """
    config = Path(superlink.environment["FLWR_HOME"]) / "run-config.toml"
    config.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
    command = ["flwr", "run", str(app), superlink.connection, "--stream"]
    command += ["--run-config", str(config)]
    if supernodes is not None:
        command += ["--federation-config", f"num-supernodes={supernodes} {resources}"]
    environment = superlink.environment | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        cwd=config.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as flwr:
        assert flwr.stdout is not None
        recent = deque[bytes](maxlen=500)  # lines in which to search for the reason of a failure
        run = ""
        try:
            for line in flwr.stdout:
                write(line)
                recent.append(line)
                if started := re.search(rb"started run (\d+)", line):
                    run = run or started[1].decode()
        except BaseException:
            flwr.kill()
            raise
    log = _COLOUR.sub("", b"".join(recent).decode(errors="replace"))
    if flwr.returncode != 0:
        lines = [line for line in log.splitlines() if re.search(r"\w", line)]
        boxed = [line.strip("│ ") for line in lines if line.startswith("│")]
        return f"not started: flwr run refused it: {' '.join(boxed or lines[-1:])}"
    return _status(superlink, run, log)


def _status(superlink: SuperLink, run: str, log: str) -> str:
    """Query a run's status; the exit status of ``flwr run --stream`` doesn't reveal it."""
    listing = subprocess.run(
        ["flwr", "ls", superlink.connection, "--run-id", run, "--format", "json"],
        # Disable colours: notebooks set FORCE_COLOR.
        env=superlink.environment | {"FORCE_COLOR": ""},
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        raise CommandError(
            f"the SuperLink doesn't report how the run ended: {listing.stderr.strip()[-2000:]}"
        )
    run_status = json.loads(listing.stdout)["runs"][0]
    status, details = str(run_status["status"]), str(run_status.get("status-details", ""))
    if status == COMPLETED:
        return status
    if status == "finished:stopped":
        return f"{status}: the run was stopped"
    reason = details.removeprefix(_FAILED).strip()
    if reason in _UNSAID:
        written = superlink.log.read_bytes() if superlink.log.exists() else b""
        own = _COLOUR.sub("", written.decode(errors="replace"))
        reason = _last_error(log) or _last_error(own) or "Flower's log gives no reason"
    return f"{status}: {reason}"


def _last_error(log: str) -> str:
    """Return the last line of the last error in Flower's log or, if it is chained, of its cause."""
    _, *records = _RECORD.split(log)
    pairs = zip(records[::2], records[1::2], strict=True)
    errors = [words.strip() for level, words in pairs if level in {"ERROR", "CRITICAL"}]
    raised = [words for words in errors if "Traceback" in words]
    causes = [_CHAINED.split(words)[0] for words in raised or errors]
    return causes[-1].rpartition("\n")[2] if causes else ""


def free_port() -> int:
    """Return an unused local port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 120.0
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    raise CommandError(f"the SuperLink did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    """In the main thread, ignore signals that end a command; other threads can't do so."""
    main = threading.current_thread() is threading.main_thread()
    ending = (signal.SIGINT, *END_SIGNALS) if main else ()
    before = {each: signal.signal(each, signal.SIG_IGN) for each in ending}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def end_processes(mark: str) -> None:
    """End all processes with the mark, including those that outlive their parents."""
    with _ignoring_signals():  # further signals would leave processes running
        left = _processes_of(mark)
        for other in left:
            with suppress(psutil.NoSuchProcess):
                other.terminate()
        _, alive = psutil.wait_procs(left, timeout=_END_SECONDS)
        # Search again, since processes may have been started in the meantime.
        alive += [other for other in _processes_of(mark) if other not in alive]
        for other in alive:
            with suppress(psutil.NoSuchProcess):
                other.kill()
        psutil.wait_procs(alive, timeout=_END_SECONDS)


def _processes_of(mark: str) -> list[psutil.Process]:
    """Find the processes with the mark in their environment, and all processes in their sessions.

    The environment alone is not sufficient: Ray's daemons overwrite it with their process title,
    and outlive their parents.
    """
    marked, sessions = [], set()
    everything = [other for other in psutil.process_iter() if other.pid != os.getpid()]
    for other in everything:
        with suppress(psutil.Error, OSError):
            if other.environ().get(MARK) == mark:
                marked.append(other)
                sessions.add(os.getsid(other.pid))
    sessions.discard(os.getsid(0))
    for other in everything:
        with suppress(OSError):
            if other not in marked and os.getsid(other.pid) in sessions:
                marked.append(other)
    return marked
