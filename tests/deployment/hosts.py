"""Hosts on one machine: a coordinator that accepts connections, and institutions that don't."""

import os
import random
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

# A host's folder, as programs in containers see it.
FOLDER = "/srv/chambers"
# The user of the containers.
USER = 49999
# The coordinator's ports that are open to institutions: proxy and block server.
PORTS = (8443, 9000)
_COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class View:
    """The files and environment variables that a program sees.

    Attributes:
        mounts: For each path that the program sees, the path on this machine.
        read_only: Paths that the program can't write to.
        environment: The program's environment variables.

    """

    mounts: dict[str, Path] = field(default_factory=dict)
    read_only: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """A host with its own files and network.

    Programs on a host run as in a container: with the containers' user, a separate network, and
    only the mounted files in ``/srv/chambers``. If namespaces aren't permitted, programs run as
    this process's user, see all files of the host's folder, and use a loopback address.

    Attributes:
        name: Name of the host.
        folder: Folder with the host's files.
        address: Address at which other hosts reach this host.
        loopback: Address at which the host's programs reach each other.
        namespace: Network namespace; empty if namespaces aren't permitted.

    """

    name: str
    folder: Path
    address: str
    loopback: str
    namespace: str

    def here(self, text: str) -> str:
        """Replace the containers' folder and loopback address with those of the host."""
        if self.namespace:
            return text
        return text.replace(FOLDER, str(self.folder)).replace("127.0.0.1", self.loopback)

    def start(
        self, command: Sequence[str], view: View, log: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start a program that writes to a log."""
        return subprocess.Popen(
            self._inside(command, view),
            cwd=self.folder,
            env=view.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(
        self, command: Sequence[str], view: View, seconds: float = _COMMAND_SECONDS
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end; ``stdout`` contains standard output and standard error."""
        return subprocess.run(
            self._inside(command, view),
            cwd=self.folder,
            env=view.environment,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )

    def make_writable(self, name: str) -> Path:
        """Create a folder that the containers' user may write to."""
        folder = self.folder / name
        folder.mkdir()
        if self.namespace:
            os.chown(folder, USER, USER)
        return folder

    def _inside(self, command: Sequence[str], view: View) -> list[str]:
        if not self.namespace:
            return list(command)
        lines = [f"mount -t tmpfs tmpfs {Path(FOLDER).parent}", f"mkdir {FOLDER}"]
        for path, source in view.mounts.items():
            make = "mkdir" if source.is_dir() else "touch"
            lines += [f"{make} {path}", f"mount --bind {shlex.quote(str(source))} {path}"]
            if path in view.read_only:
                lines.append(f"mount -o remount,bind,ro {path}")
        lines.append(f"mount -o remount,ro {Path(FOLDER).parent}")
        # The interpreter may be in root's home, so the user may read everything.
        capability = "+dac_read_search"
        lines.append(
            f"cd {FOLDER}; exec setpriv --reuid={USER} --regid={USER} --clear-groups"
            f' --inh-caps={capability} --ambient-caps={capability} "$@"'
        )
        # `ip netns exec` gives its command a separate mount namespace.
        shell = ["sh", "-ec", "\n".join(lines), "sh"]
        return ["ip", "netns", "exec", self.namespace, *shell, *command]


@contextmanager
def network(folder: Path, institutions: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Create a coordinator and institutions, each with a separate folder and network namespace.

    A router connects the hosts, and forwards to institutions only answers from the coordinator's
    public ports. If this process isn't permitted to create namespaces (usually, only root is), each
    host is a loopback address, and institutions can be reached, too.

    Args:
        folder: Folder in which a folder for each host is created.
        institutions: Names of the institutions.

    """
    names = ("coordinator", *institutions)
    for name in names:
        (folder / name).mkdir()
    if not namespaces_permitted():
        warnings.warn(
            "network namespaces are not permitted; hosts are loopback addresses", stacklevel=1
        )
        first, second = random.randint(1, 254), random.randint(0, 255)
        loopbacks = {name: f"127.{first}.{second}.{i}" for i, name in enumerate(names, start=1)}
        yield {
            name: Host(name, folder / name, address, address, "")
            for name, address in loopbacks.items()
        }
        return
    mark = f"chambers-{os.getpid()}-{random.randrange(10**6)}"
    try:
        _add_router(f"{mark}-router")
        hosts = {}
        for index, name in enumerate(names, start=1):
            namespace = f"{mark}-{name}"
            address = _add_host(namespace, f"{mark}-router", index)
            hosts[name] = Host(name, folder / name, address, "127.0.0.1", namespace)
        yield hosts
    finally:
        for name in (*names, "router"):
            subprocess.run(["ip", "netns", "delete", f"{mark}-{name}"], check=False)


@contextmanager
def cut(host: Host, port: int) -> Iterator[None]:
    """Drop packets from the coordinator's port to a host, so that neither side notices at once.

    Args:
        host: An institution with a network namespace.
        port: One of ``PORTS``.

    """
    router = f"{host.namespace.removesuffix(host.name)}router"
    subnet = f"{host.address.rpartition('.')[0]}.0/24"
    rule = f"to {subnet} ipproto tcp sport {port} blackhole priority 50"
    _ip(f"-n {router} rule add {rule}")
    try:
        yield
    finally:
        _ip(f"-n {router} rule delete {rule}")


def namespaces_permitted() -> bool:
    """Return whether this process can create network namespaces and mount files in them."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setpriv"):
        return False
    host = Host("try", Path("/"), "", "", f"chambers-{os.getpid()}-try")
    added = subprocess.run(["ip", "netns", "add", host.namespace], check=False, capture_output=True)
    if added.returncode != 0:
        return False
    try:
        return host.run(["true"], View(environment=dict(os.environ))).returncode == 0
    finally:
        _ip(f"netns delete {host.namespace}")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def _add_router(router: str) -> None:
    _ip(f"netns add {router}")
    _ip(f"netns exec {router} sysctl -qw net.ipv4.ip_forward=1")


def _add_host(namespace: str, router: str, index: int) -> str:
    """Connect a host to the router and return the host's address; index 1 is the coordinator."""
    subnet, port = f"10.77.{index}", f"host{index}"
    _ip(f"netns add {namespace}")
    _ip(f"-n {router} link add {port} type veth peer name eth0 netns {namespace}")
    _ip(f"-n {router} address add {subnet}.1/24 dev {port}")
    _ip(f"-n {router} link set {port} up")
    _ip(f"-n {namespace} address add {subnet}.2/24 dev eth0")
    _ip(f"-n {namespace} link set lo up")
    _ip(f"-n {namespace} link set eth0 up")
    _ip(f"-n {namespace} route add default via {subnet}.1")
    if index > 1:
        for source in PORTS:
            rule = f"to {subnet}.0/24 ipproto tcp sport {source} lookup main"
            _ip(f"-n {router} rule add {rule} priority 100")
        _ip(f"-n {router} rule add to {subnet}.0/24 prohibit priority 200")
    return f"{subnet}.2"
