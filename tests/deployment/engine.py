"""A Docker daemon in a network namespace, and stand-ins for images that it would pull."""

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from tests.deployment.deployment import CHECKOUT
from tests.deployment.hosts import namespaces_permitted
from tests.waiting import wait_until

_PROGRAMS = ("dockerd", "docker", "iptables", "nsenter", "debootstrap")
_START_SECONDS = 120.0
_STOP_SECONDS = 120.0
# A Debian release with the Python version of Flower's images, and what the stand-ins need from it.
_RELEASE, _PYTHON = "bookworm", (3, 11)
_PACKAGES = (
    "python3,python3-venv,ca-certificates,nginx-light,libnginx-mod-stream,curl,libtcmalloc-minimal4"
)
_BASE = f"chambers-stand-in:{hashlib.sha256(_PACKAGES.encode()).hexdigest()[:8]}"
# The module is built into nginx's own image.
_NGINX = r"""
FROM {base}
RUN printf '#!/bin/sh\nexec /usr/sbin/nginx "$1" "$2" "$3" "$4" "$5" "%s$6"\n' \
    'load_module /usr/lib/nginx/modules/ngx_stream_module.so;' > /usr/local/bin/nginx \
    && chmod 755 /usr/local/bin/nginx
"""
# As in Flower's own images, except that pip finds the packages of the environment in a folder.
_STAND_IN = """
FROM {base}
RUN useradd --no-create-home --home-dir /app --uid 49999 app && mkdir /app /python \\
    && python3 -m venv /python/venv && chown -R app:app /app /python
COPY . /wheels
ENV PATH=/python/venv/bin:$PATH HOME=/app LANG=C.UTF-8 PYTHONUNBUFFERED=1 \\
    PYTHONDONTWRITEBYTECODE=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels
WORKDIR /app
USER app
RUN pip install --no-cache-dir flwr
"""


def missing() -> str:
    """Return why no engine can be started here; empty if one can."""
    if not namespaces_permitted():
        return "network namespaces are not permitted"
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return (
            f"{', '.join(absent)} not installed (on Debian: apt-get install docker.io debootstrap)"
        )
    for plugin in ("compose", "buildx"):
        version = subprocess.run(["docker", plugin, "version"], check=False, capture_output=True)
        if version.returncode != 0:
            return f"Docker's plugin {plugin} is not installed"
    if sys.version_info[:2] != _PYTHON:
        return f"the images need packages for Python {'.'.join(map(str, _PYTHON))}"
    return ""


class Engine:
    """A Docker daemon, whose bridges and published ports are in a separate network namespace.

    Attributes:
        environment: Environment variables with which ``docker`` uses this daemon.

    """

    def __init__(self, namespace: str, data: Path, folder: Path) -> None:
        self._namespace, self._data, self._folder = namespace, data, folder
        self._process: subprocess.Popen[bytes] | None = None
        self.environment = os.environ | {
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "1",
        }

    def start(self) -> None:
        """Start the daemon, which restarts the containers that ran when it ended."""
        words = (
            *("dockerd", "--data-root", self._data, "--exec-root", self._folder / "exec"),
            *("--pidfile", self._folder / "pid", "--host", self.environment["DOCKER_HOST"]),
            *("--containerd-namespace", self._namespace),
            *("--containerd-plugins-namespace", f"{self._namespace}-plugins"),
        )
        with (self._folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._enter(*map(str, words)), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(self._answers, _START_SECONDS, self.log)

    def stop(self) -> None:
        """Stop the daemon, and with it all containers, as when the machine is shut down."""
        assert self._process
        self._process.terminate()
        self._process.wait(_STOP_SECONDS)

    def docker(self, *words: str, folder: Path = CHECKOUT, stdin: bytes = b"") -> str:
        """Run ``docker`` in a folder, and return its output; fail if the command fails."""
        return self.run("docker", *words, folder=folder, stdin=stdin)

    def run(
        self,
        *words: str,
        folder: Path = CHECKOUT,
        variables: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        status: int = 0,
    ) -> str:
        """Run a command as a user of the machine; return what it prints.

        Args:
            words: The command.
            folder: Folder in which it runs.
            variables: Additional environment variables.
            stdin: Its input.
            status: The expected exit status.

        """
        result = subprocess.run(
            self._enter(*words),
            cwd=folder,
            env=self.environment | dict(variables or {}),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        said = result.stdout.decode(errors="replace")
        assert result.returncode == status, f"{' '.join(words)}: {said}"
        return said

    def log(self) -> str:
        """Return the end of the daemon's log."""
        return (self._folder / "dockerd.log").read_text(errors="replace")[-2000:]

    def _enter(self, *words: str) -> list[str]:
        # Unlike `ip netns exec`, this leaves the control groups mounted.
        return ["nsenter", f"--net=/run/netns/{self._namespace}", *words]

    def _answers(self) -> bool:
        assert self._process and self._process.poll() is None, self.log()
        result = subprocess.run(
            ["docker", "version"], env=self.environment, check=False, capture_output=True
        )
        return result.returncode == 0


@contextmanager
def running_engine(cache: Path) -> Iterator[Engine]:
    """Start a daemon whose images are in a folder, and end it and its containers afterwards."""
    cache.mkdir(parents=True, exist_ok=True)
    namespace = f"chambers-{os.getpid()}-{random.randrange(10**6)}-engine"
    # Paths of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="chambers-engine-"))
    with FileLock(cache / "lock"):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
        engine = Engine(namespace, cache / "data", folder)
        try:
            engine.start()
            # If an earlier process was killed, its containers have been started, too.
            if found := engine.docker("ps", "--all", "--quiet").split():
                engine.docker("rm", "--force", *found)
            engine.docker("network", "prune", "--force")
            yield engine
            engine.docker("image", "prune", "--force")
        finally:
            engine.stop()
            subprocess.run(["ip", "netns", "delete", namespace], check=True)
            shutil.rmtree(folder)


def make_bases(engine: Engine, cache: Path, nginx: str, flower: list[str]) -> None:
    """Make images that stand in for nginx's and Flower's, unless an earlier call has made them.

    Args:
        engine: The engine.
        cache: Folder for downloaded packages.
        nginx: Tag of the stand-in for nginx's image.
        flower: Tags of the stand-ins for Flower's images.

    """
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["privacy"], *extras["tensorboard"], "hatchling"]
    needed = [one.replace("flwr[simulation]", "flwr") for one in needed]
    constraints = CHECKOUT / "constraints.txt"
    text = f"{needed}{constraints.read_text()}{_STAND_IN}{_PACKAGES}"
    made = f"chambers-stand-in:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not engine.docker("images", "--quiet", made):
        if not engine.docker("images", "--quiet", _BASE):
            with tempfile.TemporaryDirectory(dir=cache) as root:
                command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}"]
                subprocess.run([*command, _RELEASE, root], check=True, capture_output=True)
                packed = ["tar", "--create", "--one-file-system", "--directory", root, "."]
                release = subprocess.run(packed, check=True, capture_output=True).stdout
            engine.docker("import", "-", _BASE, stdin=release)
        with tempfile.TemporaryDirectory(dir=cache) as wheels:
            command = [sys.executable, "-m", "pip", "wheel", "--constraint", str(constraints)]
            subprocess.run([*command, "--wheel-dir", wheels, *needed], check=True, stdout=-3)
            engine.docker(
                *("build", "--tag", made, "--file", "-", "."),
                folder=Path(wheels),
                stdin=_STAND_IN.replace("{base}", _BASE).encode(),
            )
    for tag in flower:
        engine.docker("tag", made, tag)
    engine.docker("build", "--tag", nginx, "-", stdin=_NGINX.replace("{base}", _BASE).encode())
