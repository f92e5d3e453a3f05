"""A SuperLink whose database's disk is full: what is seen, and that all continues afterwards."""

import os
import secrets
from contextlib import contextmanager
from pathlib import Path

import pytest

from chambers.superlink import free_port
from tests.chambers.conftest import ROOT
from tests.chambers.site.deployment import APP, Coordinator, Institution, end, serving, start
from tests.conftest import fill, mounted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "deployment.md").read_text()
FULL = "(sqlite3.OperationalError) database or disk is full"

# The app waits for a file before it asks, and asks with more than the database has room for.
BIG = APP["tiny.py"].replace(
    b"    message = Message(content=RecordDict(),",
    b"""    import os, pathlib
    from flwr.app import ConfigRecord
    while not pathlib.Path(context.run_config["wait-for"]).exists():
        time.sleep(0.2)
    content = RecordDict({"large": ConfigRecord({"bytes": os.urandom(8_000_000)})})
    message = Message(content=content,""",
)


@pytest.fixture
def coordinator(nginx, tmp_path):
    folder = tmp_path / "coordinator"
    (folder / "release").mkdir(parents=True)
    with serving(folder / "release") as url:
        coordinator = Coordinator(folder, url)
        secret = folder / "superexec.secret"
        secret.write_bytes(secrets.token_bytes(32))
        with mounted(folder / "state", "40m"):
            words = ("--isolation=process", "--superexec-auth-secret-file=superexec.secret")
            coordinator.start(*words)
            yield coordinator
            coordinator.stop()


def superexec(coordinator):
    """Start the SuperExec, which the supervisor starts again when it has ended."""
    return start(
        *("flower-superexec", "--runtime-api-address", coordinator.address),
        *("--root-certificates", "authority.pem"),
        "--superexec-auth-secret-file=superexec.secret",
        folder=coordinator.folder,
        environment=coordinator.environment,
        log=coordinator.folder / "superexec.log",
    )


@contextmanager
def proxy(coordinator):
    """Run the proxy of docker/ on a free port; yield its address."""
    port = free_port()
    content = (ROOT / "docker" / "nginx.conf").read_text()
    for listening, here in (
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8000", coordinator.address),
        ("127.0.0.1:8002", f"127.0.0.1:{free_port()}"),
    ):
        assert listening in content
        content = content.replace(listening, here)
    (coordinator.folder / "nginx.conf").write_text(content)
    (coordinator.folder / "proxy").mkdir()
    process = start(
        *("nginx", "-p", str(coordinator.folder), "-c", "nginx.conf", "-g", "daemon off;"),
        folder=coordinator.folder,
        environment=dict(os.environ),
        log=coordinator.folder / "proxy.log",
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        end(process)


def write_app(folder: Path, go: Path) -> Path:
    folder.mkdir()
    setting = f'wait-for = "{go}"\n'.encode()
    (folder / "pyproject.toml").write_bytes(APP["pyproject.toml"] + setting)
    (folder / "tiny.py").write_bytes(BIG)
    return folder


def test_all_goes_on_when_there_is_space_again_but_the_run(coordinator, tmp_path):
    go, log = tmp_path / "go", coordinator.folder / "superlink.log"
    app = write_app(tmp_path / "app", go)
    submit = ("flwr", "run", app, "deployment")
    institution = Institution(tmp_path / "court", coordinator)
    program = superexec(coordinator)
    with proxy(coordinator) as address, institution.supernode(superlink=address) as supernode:
        wait_until(lambda: coordinator.nodes()[institution.node] == "online", 60)
        coordinator.command(*submit)
        wait_until(lambda: coordinator.runs()[0]["status"] == "running", 60)
        fill(coordinator.folder / "state")
        go.touch()
        program.wait(60)
        # Of the SuperNode, so that it has been refused once at least.
        wait_until(
            lambda: (
                f"send-node-heartbeat][UnexpectedError:OperationalError] {FULL}" in log.read_text()
            ),
            60,
        )
        status, said = coordinator.command(*submit, check=False)
        assert status != 0 and "Internal server error." in said
        assert f"### `{FULL.partition(') ')[2]}`" in PAGE
        (coordinator.folder / "state" / "ballast").unlink()
        program = superexec(coordinator)
        status, said = coordinator.run(app)
        assert status == "finished:completed", said
        assert supernode.poll() is None and coordinator.superlink.poll() is None
        wait_until(lambda: coordinator.runs()[-1]["status"].startswith("finished:failed"), 90)
        details = coordinator.runs()[-1]["status-details"]
        assert details == "No heartbeat received from the task"
    end(program)
