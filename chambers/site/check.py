"""``chambers site check``: check the folder, the machine and the connection of a host."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.site import host
from chambers.site.report import AdviceError
from chambers.sources import argument, option

_OTHER = 65534  # id of the user and group nobody, who stand for all others


@dataclass(frozen=True)
class Check:
    """Check whether an institution, or the coordinator, is ready for runs.

    \b
      chambers site check /srv/chambers

    FOLDER, by default the current one, is the host's folder. Each line begins with ok, fix or warn;
    lines with fix or warn say what to do. The exit status is 0 only if nothing needs to be fixed.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    folder: Annotated[Path, argument("[FOLDER]")] = Path()
    model: Annotated[
        str, option("Base model of the planned run; must be on this machine.", "NAME_OR_PATH")
    ] = ""
    task: Annotated[
        str, option("Task of the planned run (data.task), whose rows are checked.", "TASK")
    ] = ""

    def __call__(self) -> int:
        """Run all checks, and print a line for each check."""
        folder = self.folder.absolute()
        is_institution = (folder / host.INSTITUTION).exists()
        port = 9094 if is_institution else 8000
        reach = who_reaches(port)  # as root, before the user changes
        host.enter(folder)
        if is_institution:
            from chambers.site.check_institution import report_on_institution

            report = report_on_institution(folder, self.model, self.task)
        else:
            from chambers.site.check_coordinator import report_on_coordinator

            report = report_on_coordinator(folder, self.model)
        report.line(_check_port, port, reach)
        return 0 if report.passed else 1


def who_reaches(port: int) -> str:
    """Return who can connect to a port of this machine: ``nobody``, ``root`` or ``everybody``.

    Only root can find out; return an empty string to others.
    """
    if os.geteuid() != 0:
        return ""
    if not _connects(port):
        return "nobody"
    if not (child := os.fork()):
        os.setgroups([])
        os.setgid(_OTHER)
        os.setuid(_OTHER)
        os._exit(_connects(port))
    return "everybody" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) else "root"


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _check_port(port: int, reach: str) -> str:
    """Check whether other users of this machine can use a port that is meant for its programs."""
    if not reach:
        raise AdviceError(f"only root can check whether other users reach port {port}")
    if reach == "everybody":
        use = (
            "all interfaces of the SuperLink, and so run code at the coordinator and institutions"
            if port == 8000
            else "the SuperNode's interface, which only superexec.secret and tokens protect"
        )
        raise AdviceError(
            f"every user of this machine can use {use} (port {port}): load nftables.conf, as "
            "docs/deployment.md describes"
        )
    if reach == "nobody":
        return f"no program listens at 127.0.0.1:{port} of this machine"
    return f"port {port} is closed to the other users of this machine"
