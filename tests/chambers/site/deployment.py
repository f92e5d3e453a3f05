"""A coordinator and institutions as in deployments: TLS, node keys, a database, releases."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from chambers.site.authority import INSIDE, open_authority
from chambers.site.host import stream_module
from chambers.site.keys import open_instructions, open_node_key
from chambers.superlink import free_port
from federation.site_file import VARIABLE
from tests.chambers.conftest import ROOT
from tests.site_files import write_site
from tests.waiting import wait_until

FLOWER = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
}

# The smallest app: it asks one SuperNode, and fails unless the SuperNode answers.
APP = {
    "pyproject.toml": b"""
[project]
name = "tiny"
version = "1.0.0"
[tool.flwr.app]
publisher = "courts"
[tool.flwr.app.components]
serverapp = "tiny:server"
clientapp = "tiny:client"
[tool.flwr.app.config]
""",
    "tiny.py": b"""
import time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()

@server.main()
def ask(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.5)
    message = Message(content=RecordDict(), dst_node_id=nodes[0], message_type="query")
    (reply,) = grid.send_and_receive([message], timeout=300)
    if reply.has_error():
        raise RuntimeError(reply.error.reason)

@client.query()
def answer(message, context):
    return Message(content=RecordDict(), reply_to=message)
""",
}


class Release(SimpleHTTPRequestHandler):
    """Serve a folder's files as nginx does, and answer a POST with ``fetch-fab.json``."""

    def do_POST(self):
        assert self.path == "/hub/fetch-fab"
        self.rfile.read(int(self.headers["Content-Length"]))
        self.path = "/fetch-fab.json"
        self.do_GET()

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder to a SuperLink, and yield its URL."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: Release(*given, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def end(process: subprocess.Popen) -> None:
    """Terminate a process and its children as a supervisor does; kill those that remain."""
    own = [psutil.Process(process.pid)] if process.poll() is None else []
    started = [*own, *(child for one in own for child in one.children(recursive=True))]
    process.terminate()
    for one in psutil.wait_procs(started, timeout=20)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(20)


def start(*words: str, folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("ab") as output:
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output)


@contextmanager
def proxy(folder: Path, superlink: str) -> Iterator[str]:
    """Run the proxy of docker/ in a coordinator's folder, on a free port; yield its address."""
    port = free_port()
    content = (ROOT / "docker" / "nginx.conf").read_text()
    for listening, here in (
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8444", f"127.0.0.1:{free_port()}"),
        ("127.0.0.1:8000", superlink),
        ("127.0.0.1:8002", f"127.0.0.1:{free_port()}"),
    ):
        assert listening in content
        content = content.replace(listening, here)
    (folder / "nginx.conf").write_text(content)
    (folder / "proxy").mkdir()
    with running_nginx(folder, "nginx.conf"):
        yield f"127.0.0.1:{port}"


@contextmanager
def running_nginx(folder: Path, config: str) -> Iterator[None]:
    """Run nginx in a folder with a configuration file from that folder."""
    process = start(
        *("nginx", "-p", str(folder), "-c", config, "-g", f"{stream_module()}daemon off;"),
        folder=folder,
        environment=dict(os.environ),
        log=folder / "nginx.log",
    )
    try:
        yield
    finally:
        end(process)


def documented(section: str, **values: str | Path) -> list[str]:
    """Return a section's commands in docs/operations.md, with values for its placeholders."""
    text = (ROOT / "docs" / "operations.md").read_text()
    (found,) = (part for part in text.split("\n## ")[1:] if part.startswith(f"{section}\n"))
    blocks = re.findall(r"```sh\n(.*?)```", found, flags=re.DOTALL)
    for name, value in values.items():
        assert any(name in block for block in blocks)
        blocks = [block.replace(name, str(value)) for block in blocks]
    return blocks


@dataclass
class Coordinator:
    """A SuperLink with its certificates, database and release in ``folder``."""

    folder: Path
    hub: str
    port: int = field(default_factory=free_port)

    def __post_init__(self):
        for name in ("state/.flwr", "database"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "state" / ".flwr" / "config.toml").write_text(
            f'[superlink.deployment]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.folder / "authority.pem"}"\n'
        )
        open_authority(self.folder).issue(self.folder, list(INSIDE), 365)
        open_instructions(self.folder)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return (
            os.environ
            | FLOWER
            | {
                "FLWR_HOME": str(self.folder / "state" / ".flwr"),
                "FLWR_SUPERGRID_API_URL": self.hub,
            }
        )

    def start(self, *options: str) -> None:
        self.superlink = start(
            *("chambers-superlink", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ssl-ca-certfile", "authority.pem", "--ssl-certfile", "server.pem"),
            *("--ssl-keyfile", "server.key", "--enable-supernode-auth"),
            *("--database", "database/superlink.db", "--disable-runtime-dependency-installation"),
            *options,
            folder=self.folder,
            environment=self.environment,
            log=self.folder / "superlink.log",
        )
        wait_until(lambda: self.command("flwr", "ls", "deployment", check=False)[0] == 0, 120)

    def stop(self) -> None:
        end(self.superlink)

    def command(self, *words: str | Path, check: bool = True) -> tuple[int, str]:
        """Run a command in the folder; return its exit status and output."""
        ended = subprocess.run(
            list(map(str, words)),
            cwd=self.folder,
            env=self.environment | {"PYTHONPATH": str(ROOT)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0 or not check, ended.stdout + ended.stderr
        return ended.returncode, ended.stdout + ended.stderr

    def register(self, key: Path) -> str:
        """Register a node key; return the node's id."""
        words = ("supernode", "register", f"{key}.pub", "deployment", "--name", key.parent.name)
        return str(self._listed(*words)["node-id"])

    def nodes(self) -> dict[str, str]:
        """Return the registered nodes' states by id."""
        nodes = self._listed("supernode", "ls", "deployment")["nodes"]
        return {str(node["node-id"]): node["status"] for node in nodes}

    def run(self, app: str | Path, **config: Any) -> tuple[str, str]:
        """Run an app; return the run's status and log."""
        file = self.folder / "run-config.toml"
        file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in config.items()))
        _, log = self.command("flwr", "run", app, "deployment", "--stream", "--run-config", file)
        return self.runs()[0]["status"], log

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs, newest first."""
        runs: list[dict[str, Any]] = self._listed("ls", "deployment")["runs"]
        return runs

    def _listed(self, *words: str) -> dict[str, Any]:
        _, output = self.command("flwr", *words, "--format", "json")
        return json.loads(output[output.index("{") : output.rindex("}") + 1])


@dataclass
class Institution:
    """A SuperNode with its key and list of trusted entities in ``folder``."""

    folder: Path
    coordinator: Coordinator

    def __post_init__(self):
        self.folder.mkdir()
        shutil.copy(self.coordinator.folder / "authority.pem", self.folder)
        open_node_key(self.key)
        self.node = self.coordinator.register(self.key)

    @property
    def key(self) -> Path:
        return self.folder / "node"

    @contextmanager
    def supernode(self, superlink: str = ""):
        """Run the SuperNode with its own home directory and folder for temporary files.

        Args:
            superlink: Address of the proxy, if there is one.
        """
        site = write_site(self.folder, "court", self.folder / "data")
        trusted = ("--trusted-entities", "trusted.yaml")
        temporary = self.folder / "home" / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        own = {"HOME": str(self.folder / "home"), "TMPDIR": str(temporary), "CHAMBERS_CACHE": ""}
        own[VARIABLE] = str(site)
        process = start(
            *("chambers-supernode", "--superlink", superlink or self.coordinator.address),
            *("--root-certificates", "authority.pem", "--auth-supernode-private-key", "node"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *(trusted if (self.folder / "trusted.yaml").exists() else ()),
            folder=self.folder,
            environment=os.environ | FLOWER | own,
            log=self.folder / "supernode.log",
        )
        try:
            yield process
        finally:
            end(process)

    @property
    def log(self) -> str:
        return (self.folder / "supernode.log").read_text()
