"""Failures of a deployment: the messages that users see.

docs/deployment.md explains those that don't say what to do.
"""

import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from chambers.site.authority import open_authority
from chambers.site.host import stream_module
from chambers.site.keys import open_node_key
from chambers.site.release import open_signing_key
from tests.conftest import write_checkpoint
from tests.deployment.conftest import contains, explained
from tests.deployment.deployment import CHECKOUT, COMPLETED, DeploymentError
from tests.deployment.hosts import FOLDER
from tests.deployment.test_hosts import SHORT

pytestmark = pytest.mark.slow


def supernode(running, *options, without=""):
    """Start a second SuperNode at the court, wait until it ends, and return its output."""
    program = running.programs["court"]["supernode"]
    own = [word for word in program.command if word.partition("=")[0] != without]
    # If an option is given twice, the last value is used.
    command = [*own, "--port=9095", *options]
    return program.host.run(command, program.view, seconds=60).stdout


@contextmanager
def other_proxy(running, name, days):
    """Start a second proxy, whose certificate is valid for ``name`` and ``days`` days."""
    host = running.hosts["coordinator"]
    folder = host.folder / f"other-{time.monotonic_ns()}"
    folder.mkdir()
    host.make_writable(f"{folder.name}/proxy")
    open_authority(host.folder).issue(folder, [name], days)
    shutil.copy(host.folder / "authority.pem", folder)
    content = host.here((CHECKOUT / "docker" / "nginx.conf").read_text())
    content = content.replace("listen 8443", "listen 9000").replace(":8002", ":8003")
    content = content.replace(":8444", ":8445")
    (folder / "nginx.conf").write_text(content)
    view = replace(running.programs["coordinator"]["proxy"].view, mounts={})
    command = [
        "nginx",
        "-p",
        str(folder),
        "-c",
        "nginx.conf",
        "-g",
        f"{stream_module()}daemon off;",
    ]
    with (folder / "log").open("wb") as log:
        process = host.start(command, view, log)
    try:
        time.sleep(1)
        yield f"--superlink={host.address}:9000"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.nightly
def test_another_authority(running, tmp_path):
    open_authority(tmp_path)
    said = supernode(running, f"--root-certificates={tmp_path / 'authority.pem'}")
    explained(said, "unable to get local issuer certificate")


@pytest.mark.nightly
def test_an_expired_certificate(running):
    with other_proxy(running, running.hosts["coordinator"].address, days=0) as address:
        explained(supernode(running, address), "certificate has expired")


@pytest.mark.nightly
def test_a_certificate_for_another_name(running):
    with other_proxy(running, "coordinator.example.org", days=1) as address:
        said = supernode(running, address)
    explained(
        said.replace(running.hosts["coordinator"].address, "10.0.0.5"),
        "IP address mismatch, certificate is not valid for '10.0.0.5'",
    )


@pytest.mark.nightly
def test_a_key_that_is_not_registered_or_in_use(running):
    key = running.hosts["court"].folder / "unregistered"
    open_node_key(key)
    for option in (f"--auth-supernode-private-key={key}", "--port=9095"):
        explained(supernode(running, option), "[code: 2004] Failed to activate SuperNode.")


@pytest.mark.nightly
def test_no_key(running):
    said = supernode(running, without="--auth-supernode-private-key")
    explained(said, "[code: 2001] SuperNode authentication is enabled.")


@pytest.mark.nightly
def test_a_signing_key_as_node_key(running):
    key = running.hosts["court"].folder / "signing" / "key"
    open_signing_key(key)
    said = supernode(running, f"--auth-supernode-private-key={key}")
    contains(said, "Unable to parse the private key file.")


@pytest.mark.nightly
def test_a_key_without_tls(running):
    said = supernode(running, "--insecure", without="--root-certificates")
    contains(said, "Insecure connection is enabled, but the SuperNode's private key is provided")


@pytest.mark.nightly
def test_a_key_that_is_registered_twice(running):
    with pytest.raises(DeploymentError) as refused:
        running.register("tribunal", running.hosts["court"].folder / "node.pub")
    explained(str(refused.value), "Public key already in use.")


@pytest.mark.nightly
def test_no_coordinator(running):
    closed = f"--superlink={running.hosts['coordinator'].address}:9000"
    explained(
        supernode(running, closed, "--max-retries=2"), "Connection attempt failed, retrying in"
    )


@pytest.mark.nightly
def test_flwr_with_another_authority(running, tmp_path):
    open_authority(tmp_path)
    beside = running.programs["coordinator"]["superexec"]
    (tmp_path / "config.toml").write_text(
        f'[superlink.deployment]\naddress = "{beside.host.loopback}:8000"\n'
        f'root-certificates = "{tmp_path / "authority.pem"}"\n'
    )
    view = replace(beside.view, environment=beside.view.environment | {"FLWR_HOME": str(tmp_path)})
    said = beside.host.run(["flwr", "ls", "deployment"], view).stdout
    explained(said, "Connection to the SuperLink is unavailable")


@pytest.mark.nightly
def test_a_superexec_that_has_ended(running):
    superexec = running.programs["coordinator"]["superexec"]
    superexec.stop()
    run = running.submit(SHORT)
    time.sleep(3)
    explained(running.status(), "pending")
    running.flwr("stop", str(run), "deployment")
    superexec.start()
    superexec.wait_until_ready()


@pytest.mark.nightly
def test_another_model(running, tmp_path):
    """The court's base model differs from that of the coordinator and the other institution."""
    if not running.hosts["court"].namespace:
        pytest.skip("without namespaces all hosts have the same files")
    superexec = running.programs["court"]["superexec"]
    own = superexec.view
    other = write_checkpoint(tmp_path, blocks=3)
    superexec.stop()
    superexec.view = replace(own, mounts=own.mounts | {f"{FOLDER}/model": other})
    superexec.start()
    status, log = running.run(SHORT | {"strategy": "fedjudge-base"})
    assert status != COMPLETED
    contains(log, "its base model is not the run's")
    superexec.stop()
    superexec.view = own
    superexec.start()


@pytest.mark.nightly
def test_an_unsigned_app(running):
    status, log = running.run(SHORT, app=str(CHECKOUT))
    assert status != COMPLETED
    explained(log, "The FAB could not be verified.")


def test_a_refusal_by_the_sites_policy(running):
    policy = running.hosts["court"].folder / "policy.toml"
    own = policy.read_text()
    policy.write_text('strategies = ["fl-glm"]\n' + own)
    status, log = running.run(SHORT)
    policy.write_text(own)
    assert status != COMPLETED
    contains(log, "the site's policy refuses")
