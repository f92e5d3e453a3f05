"""The commands of docs/operations.md, and signed releases, with real SuperLinks and SuperNodes."""

import hashlib
import json
import os
import re
import shutil
import subprocess

import pytest
import yaml
from flwr.cli.build import build_fab_from_files

from chambers.site.keys import open_node_key
from chambers.site.release import open_signing_key
from tests.chambers.conftest import ROOT
from tests.chambers.site.deployment import APP, Coordinator, Institution, documented, serving
from tests.conftest import write_rows
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
REFUSED = "The FAB could not be verified."


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coordinator") / "chambers"
    (folder / "release").mkdir(parents=True)
    with serving(folder / "release") as url:
        coordinator = Coordinator(folder, url)
        coordinator.start()
        yield coordinator
        coordinator.stop()


@pytest.fixture
def institution(coordinator, tmp_path):
    return Institution(tmp_path / "court", coordinator)


def reviewer(folder):
    """Make a signing key; return the line that trusting sites add to trusted.yaml."""
    open_signing_key(folder / "key")
    return (folder / "trusted.yaml").read_text()


def release(coordinator, key, **changed):
    """Build a release of the tiny app, and sign it."""
    file = key.parent / "tiny.fab"
    file.write_bytes(build_fab_from_files(APP | changed)[0])
    sign(coordinator, file, key)


def sign(coordinator, file, key):
    words = ("--key", key / "key", "--output", "release", "--url", coordinator.hub)
    coordinator.command("chambers", "site", "sign", file, *words)


def bash(coordinator, block):
    return coordinator.command("bash", "-ec", block)[1]


def checked(coordinator, institution):
    variables = f"COORDINATOR={coordinator.address}\nINSTITUTION=court\n"
    (institution.folder / "institution.env").write_text(variables)
    (institution.folder / "state").mkdir(exist_ok=True)
    return coordinator.command("chambers", "site", "check", institution.folder, check=False)[1]


def test_only_signed_code_runs_until_the_key_is_withdrawn(coordinator, institution, tmp_path):
    line = reviewer(tmp_path / "alice")
    other = reviewer(tmp_path / "bob")
    trusted = institution.folder / "trusted.yaml"
    trusted.write_text(line)
    app = tmp_path / "app"
    app.mkdir()
    for name, content in APP.items():
        (app / name).write_bytes(content)
    with institution.supernode():
        release(coordinator, tmp_path / "alice")
        assert coordinator.run("@courts/tiny==1.0.0")[0] == "finished:completed"
        status, log = coordinator.run(app)
        assert status.startswith("finished:failed") and REFUSED in log
        # The coordinator changes the code after it was signed.
        (served,) = (coordinator.folder / "release").glob("*.fab")
        altered = APP["tiny.py"] + b"print(1)"
        served.write_bytes(build_fab_from_files(APP | {"tiny.py": altered})[0])
        status, log = coordinator.run("@courts/tiny==1.0.0")
        assert status.startswith("finished:failed") and REFUSED in log
        release(coordinator, tmp_path / "bob", **{"tiny.py": altered})
        status, log = coordinator.run("@courts/tiny==1.0.0")
        assert status.startswith("finished:failed") and REFUSED in log
    # Alice's key is withdrawn; then Bob also signs the release.
    trusted.write_text(line + other)
    (key_id,) = yaml.safe_load(line)
    (block,) = documented("Withdraw a signing key", KEY_ID=key_id)
    subprocess.run(["bash", "-ec", block], cwd=institution.folder, check=True)
    assert trusted.read_text() == other
    with institution.supernode():
        release(coordinator, tmp_path / "alice")
        status, log = coordinator.run("@courts/tiny==1.0.0")
        assert status.startswith("finished:failed") and REFUSED in log
        sign(coordinator, tmp_path / "tiny.fab", tmp_path / "bob")
        assert coordinator.run("@courts/tiny==1.0.0")[0] == "finished:completed"


@pytest.mark.nightly
def test_an_upgrade_needs_no_restart(coordinator, institution, tmp_path):
    (institution.folder / "trusted.yaml").write_text(reviewer(tmp_path / "alice"))
    app = tmp_path / "tiny"
    app.mkdir()
    with institution.supernode() as process:
        for version in ("1.0.0", "2.0.0"):
            for name, content in APP.items():
                (app / name).write_bytes(content.replace(b"1.0.0", version.encode()))
            for file in coordinator.folder.glob("*.fab"):
                file.unlink()
            coordinator.command("flwr", "build", "--app", app)
            (file,) = coordinator.folder.glob("*.fab")
            (block,) = documented("Upgrade", KEY=tmp_path / "alice" / "key")
            bash(coordinator, f"{block.strip()} --url {coordinator.hub} {file}")
            assert coordinator.run(f"@courts/tiny=={version}")[0] == "finished:completed"
        assert process.poll() is None


@pytest.mark.nightly
def test_an_expelled_node_cannot_return(coordinator, institution, tmp_path):
    with institution.supernode() as process:
        wait_until(lambda: coordinator.nodes()[institution.node] == "online", 60)
        (block,) = documented("Expel an institution")
        key = (institution.folder / "node.pub").read_bytes()
        row = f"{institution.node:20} online     "
        (line,) = (line for line in bash(coordinator, block).splitlines() if row in line)
        assert line.startswith("court ") and line.endswith(hashlib.sha256(key).hexdigest())
        process.wait(60)
    with institution.supernode() as process:
        assert process.wait(60) == 1
    assert "[code: 2004] Failed to activate SuperNode." in institution.log
    assert f"fix  {institution.key} is not registered" in checked(coordinator, institution)
    admit = ("chambers", "site", "admit", f"{institution.key}.pub", "--name", "court")
    status, output = coordinator.command(*admit, check=False)
    assert status == 2 and "[code: 23] Public key already in use." in output
    _, listed = coordinator.command("chambers", "site", "nodes")
    assert f"{institution.node:20} expelled   " in listed
    # With a new key, it is admitted once; its number of rows can be changed.
    institution.key.rename(tmp_path / "old")
    (institution.folder / "node.pub").unlink()
    open_node_key(institution.key)
    (coordinator.folder / "flower.env").write_text(f"HOME={tmp_path}\nXDG_DATA_HOME=\n")
    coordinator.command(*admit, "--rows", "12")
    _, output = coordinator.command(*admit, "--rows", "1200")
    assert re.search(r"court is admitted as node \d+, with the key \w{64} and 1200 rows", output)
    agreed = tmp_path / ".local" / "share" / "chambers" / "agreed-rows.json"
    assert json.loads(agreed.read_bytes()) == {"court": 1200}
    status, output = coordinator.command(*admit, check=False)
    assert status == 2 and "to change its number of rows" in output
    assert json.loads(agreed.read_bytes()) == {"court": 1200}
    open_node_key(tmp_path / "other")
    other = tmp_path / "other.pub"
    admit = ("chambers", "site", "admit", other, "--name", "court", "--rows", "5")
    status, output = coordinator.command(*admit, check=False)
    assert status == 2 and "court is admitted; to replace its key, expel it first" in output
    (coordinator.folder / "flower.env").unlink()
    status, output = coordinator.command("chambers", "site", "expel", "tribunal", check=False)
    assert status == 2 and "tribunal is not admitted" in output


@pytest.mark.nightly
def test_check_reports_a_registered_key_without_changes(coordinator, institution):
    line = f"ok   {institution.key} is registered"
    assert line in checked(coordinator, institution)
    assert coordinator.nodes()[institution.node] == "registered"
    with institution.supernode() as process:
        wait_until(lambda: coordinator.nodes()[institution.node] == "online", 60)
        assert line in checked(coordinator, institution)
        assert coordinator.nodes()[institution.node] == "online"
        assert process.poll() is None


@pytest.mark.nightly
def test_renewal_and_a_restored_backup_keep_the_nodes(coordinator, institution, tmp_path):
    backup, restore, _ = documented("Back up and restore")
    (renew,) = documented("Renew the coordinator's certificate")
    reviewer(tmp_path / "alice")
    release(coordinator, tmp_path / "alice")
    with institution.supernode() as process:
        assert coordinator.run("@courts/tiny==1.0.0")[0] == "finished:completed"
        for _ in range(2):  # the second backup replaces the first
            bash(coordinator, backup)
        assert (coordinator.folder / "backup").stat().st_mode & 0o77 == 0
        later = Institution(tmp_path / "later", coordinator)
        assert later.node in coordinator.nodes()
        before = (coordinator.folder / "server.pem").read_bytes()
        bash(coordinator, renew)
        assert (coordinator.folder / "server.pem").read_bytes() != before
        coordinator.stop()
        state = coordinator.folder / "database"
        if os.geteuid() == 0:
            os.chown(state, 65534, 65534)
        bash(coordinator, restore)
        restored = (state / "superlink.db").stat()
        assert (restored.st_uid, restored.st_mode & 0o777) == (state.stat().st_uid, 0o600)
        coordinator.start()
        nodes = coordinator.nodes()
        assert institution.node in nodes and later.node not in nodes
        assert coordinator.run("@courts/tiny==1.0.0")[0] == "finished:completed"
        assert process.poll() is None


@pytest.mark.nightly
def test_deletion_leaves_nothing_of_a_run(coordinator, institution, checkpoint, tmp_path):
    """Sign a release of this app, run it to the end, and delete it."""
    key = tmp_path / "alice"
    (institution.folder / "trusted.yaml").write_text(reviewer(key))
    app = tmp_path / "chambers"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (app / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, app / name)
    coordinator.command("flwr", "build", "--app", app)
    (file,) = coordinator.folder.glob("chambers.*.fab")
    sign(coordinator, file, key)
    write_rows(institution.folder / "data" / "train.jsonl", 8, seed=1)
    config = {
        "strategy": "fedjudge-base",
        "rounds": 1,
        "min-nodes": 1,
        "model.name": str(checkpoint),
        "adapter.targets": "q_proj,v_proj",
        "train.local-steps": 1,
        "output-dir": str(tmp_path / "runs"),
        "instruction-key": str(coordinator.folder / "instructions.key"),
    }
    home = institution.folder / "home"
    with institution.supernode():
        status, log = coordinator.run("@chambers/chambers==0.1.0", **config)
        assert status == "finished:completed", log
    assert list(home.rglob("adapter_model.safetensors")) and list(home.rglob("fingerprints/*"))
    (block,) = documented("Delete")
    environment = {k: v for k, v in os.environ.items() if k != "FLWR_HOME"} | {"HOME": str(home)}
    subprocess.run(["bash", "-ec", block], env=environment, check=True)
    # Flower's file with a random name for the installation remains.
    assert [path for path in home.rglob("*") if path.is_file()] == [home / ".flwr" / "source"]
