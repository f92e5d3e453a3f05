"""A SuperLink whose database's disk is full: what users see, and that runs continue afterwards."""

import secrets
from pathlib import Path

import pytest

from tests.chambers.conftest import ROOT
from tests.chambers.site.deployment import (
    APP,
    Coordinator,
    Institution,
    documented,
    end,
    proxy,
    serving,
    start,
)
from tests.conftest import fill, mounted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "deployment.md").read_text()
FULL = "(sqlite3.OperationalError) database or disk is full"

# The app waits for a file, and then sends a message that is too large for the database.
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
    """A SuperLink whose database's disk has 40 MiB."""
    folder = tmp_path / "coordinator"
    (folder / "release").mkdir(parents=True)
    with serving(folder / "release") as url:
        coordinator = Coordinator(folder, url)
        secret = folder / "superexec.secret"
        secret.write_bytes(secrets.token_bytes(32))
        with mounted(folder / "database", "40m"):
            words = ("--isolation=process", "--superexec-auth-secret-file=superexec.secret")
            coordinator.start(*words)
            yield coordinator
            coordinator.stop()


def superexec(coordinator):
    """Start the SuperExec, and restart it whenever it ends, as a supervisor does."""
    return start(
        *("flower-superexec", "--runtime-api-address", coordinator.address),
        *("--root-certificates", "authority.pem"),
        "--superexec-auth-secret-file=superexec.secret",
        folder=coordinator.folder,
        environment=coordinator.environment,
        log=coordinator.folder / "superexec.log",
    )


def write_app(folder: Path, go: Path) -> Path:
    folder.mkdir()
    setting = f'wait-for = "{go}"\n'.encode()
    (folder / "pyproject.toml").write_bytes(APP["pyproject.toml"] + setting)
    (folder / "tiny.py").write_bytes(BIG)
    return folder


@pytest.mark.nightly
def test_everything_but_the_run_continues_once_there_is_space(coordinator, tmp_path):
    go, log = tmp_path / "go", coordinator.folder / "superlink.log"
    app = write_app(tmp_path / "app", go)
    submit = ("flwr", "run", app, "deployment")
    institution = Institution(tmp_path / "court", coordinator)
    program = superexec(coordinator)
    with (
        proxy(coordinator.folder, coordinator.address) as address,
        institution.supernode(superlink=address) as supernode,
    ):
        wait_until(lambda: coordinator.nodes()[institution.node] == "online", 60)
        coordinator.command(*submit)
        wait_until(lambda: coordinator.runs()[0]["status"] == "running", 60)
        fill(coordinator.folder / "database")
        go.touch()
        program.wait(60)
        # Wait until a heartbeat of the SuperNode has been refused.
        wait_until(
            lambda: (
                f"send-node-heartbeat][UnexpectedError:OperationalError] {FULL}" in log.read_text()
            ),
            60,
        )
        status, said = coordinator.command(*submit, check=False)
        assert status != 0 and "Internal server error." in said
        assert f"### `{FULL.partition(') ')[2]}`" in PAGE
        (coordinator.folder / "database" / "ballast").unlink()
        program = superexec(coordinator)
        status, said = coordinator.run(app)
        assert status == "finished:completed", said
        assert supernode.poll() is None and coordinator.superlink.poll() is None
        wait_until(lambda: coordinator.runs()[-1]["status"].startswith("finished:failed"), 90)
        details = coordinator.runs()[-1]["status-details"]
        assert details == "No heartbeat received from the task"
    end(program)
    # Restoring a backup deletes what was sent, and so shrinks the database.
    backup, restore, _ = documented("Back up and restore")
    coordinator.stop()
    database = coordinator.folder / "database" / "superlink.db"
    assert database.stat().st_size > 8_000_000
    coordinator.command("bash", "-ec", backup + restore)
    assert database.stat().st_size < 4_000_000
    coordinator.start()
    assert institution.node in coordinator.nodes()
