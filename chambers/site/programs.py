"""``chambers site up`` and ``worker``: run the programs of a host."""

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from string import Template
from threading import Thread
from typing import Annotated, NoReturn

from chambers.allocator import allocator_variables
from chambers.errors import CommandError, interrupt_at_end
from chambers.site.host import SITE, enter, read_environment
from chambers.sources import argument, option
from federation.site_file import VARIABLE, read_site_file
from finetuning.files import write_file

# File in a host's folder with the port of the SuperNode that ``chambers site up`` has started.
PORT = Path("state", "supernode.port")


@dataclass(frozen=True)
class Up:
    """Run the programs of the coordinator or an institution, and show their output.

    \b
      chambers site up /srv/chambers

    FOLDER is a host's folder, by default the current one; its units, in the folder systemd, name
    the programs. The output of each is also appended to a file in state/logs. All programs end on
    Ctrl-C, or if one of them ends. In production, let systemd or Compose start them.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("[FOLDER]")] = Path()

    def __call__(self) -> int:
        """Run until interrupted, and return 0; return 1 if a program has ended."""
        from chambers.superlink import MARK, end_processes, free_port

        folder = self.folder.absolute()
        enter(folder)
        port = free_port()
        programs = _read_programs(folder, port)
        if "supernode" in programs:
            write_file(folder / PORT, str(port))
        logs = folder / "state" / "logs"
        logs.mkdir(exist_ok=True)
        interrupt_at_end()
        mark, names = uuid.uuid4().hex, {}
        try:
            for name, (command, environment) in programs.items():
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env={**os.environ, **environment, MARK: mark},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C reaches only this process, which ends the others.
                    start_new_session=True,
                )
                names[process.pid] = name
                log = (logs / f"{name}.log").open("ab", buffering=0)
                Thread(target=_copy, args=(name, process, log), daemon=True).start()
            name = names[os.waitpid(-1, 0)[0]]
        except KeyboardInterrupt:
            return 0
        finally:
            end_processes(mark)
            (folder / PORT).unlink(missing_ok=True)
        print(f"chambers site up: {name} has ended; see {logs}/{name}.log", file=sys.stderr)
        return 1


def _read_programs(folder: Path, port: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the command and the environment variables of each unit in a host's folder.

    Hosts on one machine share its ports, so each SuperNode has a free ``port``.
    """
    programs = {}
    # The programs end even if this process is killed.
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    for unit in sorted((folder / "systemd").glob("*.service")):
        text = unit.read_text(encoding="utf-8").replace("\\\n", " ")
        text = text.replace("--port=9094", f"--port={port}")
        text = text.replace("127.0.0.1:9094", f"127.0.0.1:{port}")
        if os.geteuid() == 0:  # otherwise, nginx would read files as another user
            text = text.replace("daemon off;", "daemon off; user root;")
        variables: dict[str, str] = {}
        command = []
        for key, _, value in (line.partition("=") for line in text.splitlines()):
            if key == "EnvironmentFile":
                variables |= read_environment(Path(value))
            elif key == "Environment":
                variable, _, assigned = shlex.split(value)[0].partition("=")
                variables[variable] = assigned
            elif key == "ExecStart":
                words = [Template(word).safe_substitute(variables) for word in shlex.split(value)]
                command = [word for word in words if "--health-server-address" not in word]
        name = unit.stem.removeprefix("chambers-")
        if name == "firewall" or (name == "worker" and not read_site_file(folder / SITE).worker):
            continue
        if not shutil.which(command[0]):
            raise CommandError(f"{command[0]}, which {unit} starts, is not installed")
        programs[name] = ([*bound, *command], variables)
    if not programs:
        raise CommandError(f"{folder} has no units in the folder systemd")
    return programs


def _copy(name: str, process: "subprocess.Popen[bytes]", log: FileIO) -> None:
    """Copy a program's output to its log and, with its name, to standard output."""
    assert process.stdout is not None
    with log:
        for line in process.stdout:
            # Continue on a full disk: the program would stop at its next line if nobody read it.
            with suppress(OSError):
                log.write(line)
            with suppress(OSError):  # nobody reads standard output any more
                print(f"{name:9} | {line.decode(errors='replace')}", end="", flush=True)


@dataclass(frozen=True)
class StartWorker:
    """Answer this institution's messages in one process that keeps model and data in memory.

    \b
      chambers site worker /srv/chambers

    Without a worker, each message starts a process that loads model and data again. FOLDER is the
    institution's, by default the current one; its site.toml must name the worker's socket. Don't
    share the socket's folder with other sites. docs/operations.md describes when a running worker
    isn't used.

    With --allow-uid, the socket's folder must belong to the worker's user and a group of both
    users, and have the set-group-id bit (chmod 2770); the site file and the policy must belong to
    root. The policy must set audit-log and privacy.account, whose defaults depend on HOME. The
    institution is left out when the worker isn't running: only its user can write the audit log.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("[FOLDER]")] = Path()
    allow_uid: Annotated[
        list[int] | None,
        option("Another user whose ClientApps may use the worker; may be repeated.", "UID"),
    ] = None

    def __call__(self) -> NoReturn:
        """Replace this process with the worker."""
        allowed = [f"--allow-uid={uid}" for uid in self.allow_uid or []]
        # -P prevents imports from the working directory, which other users may control.
        command = [sys.executable, "-P", "-m", "client_app.worker", *allowed]
        code = Path(__file__).resolve().parents[2]
        own = {"PYTHONPATH": str(code), VARIABLE: str(self.folder.absolute() / SITE)}
        sys.stdout.flush()
        os.execve(command[0], command, {**os.environ, **own, **allocator_variables()})
