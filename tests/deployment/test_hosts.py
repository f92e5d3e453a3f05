"""A coordinator and two institutions on separate hosts, with the programs of ``docker/``."""

import grp
import json
import os
import pwd
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deployment.conftest import results
from tests.deployment.deployment import CHECKOUT, COMPLETED
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
OUTSIDER = Path(__file__).with_name("outsider.py")
SHORT = {"rounds": 1, "train.local-steps": 1, "train.batch-size": 2, "train.accumulation": 1}


def train(running, config):
    """Run with the given settings, and check that both institutions took part."""
    status, log = running.run(SHORT | config)
    assert status == COMPLETED, log
    lines = (results(running) / "metrics.jsonl").read_text().splitlines()
    (round_,) = (event for event in map(json.loads, lines) if event["event"] == "round")
    assert round_["participants"] == ["consultation", "court"]


def outsider(running, host, attempt, *arguments):
    """Run an attack of ``outsider.py`` on a host, and return the answers."""
    beside = running.programs[host]["superlink" if host == "coordinator" else "supernode"]
    environment = beside.view.environment | {"PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, str(OUTSIDER), attempt, *arguments]
    result = beside.host.run(command, replace(beside.view, environment=environment), seconds=300)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_a_full_run_over_tls_with_node_keys_and_a_signed_release(running):
    """The next test uses client-batch lanes; test_walk.py uses serial lanes and all strategies."""
    train(running, {"strategy": "fl-glm", "split.schedule": "hierarchical"})


@pytest.mark.nightly
def test_the_block_server_refuses_who_has_no_ticket(running):
    """While a run trains, an institution's network can reach the block server."""
    answers = []
    address = running.settings["split.listen"]
    attempt = threading.Thread(
        target=lambda: answers.append(outsider(running, "court", "block-server", address))
    )
    attempt.start()
    train(running, {"strategy": "fl-glm", "split.schedule": "client-batch"})
    attempt.join()
    (answer,) = answers
    assert answer.startswith("HandshakeError"), answer


def test_an_institution_reaches_only_what_supernodes_need(running):
    answers = outsider(running, "court", "interfaces", running.address, "authority.pem")
    refused = {name: status for name, (status, _) in answers.items() if status == 403}
    assert set(refused) == {
        "submit a run",
        "register a node",
        "list nodes",
        "read logs",
        "take a task",
    }
    assert all("nginx" in answers[name][1] for name in refused)
    assert json.loads(answers["register as a SuperNode"][1])["code"] == 2001
    assert json.loads(answers["be active unregistered"][1])["code"] == 2004
    assert answers["pull another's messages"][0] == 401
    # The proxy refuses these; the SuperLink itself refuses few of them.
    inside = f"{running.hosts['coordinator'].loopback}:8000"
    answers = outsider(running, "coordinator", "interfaces", inside, "authority.pem")
    assert answers["register a node"] == answers["list nodes"] == [200, ""]
    assert answers["take a task"][0] == 401


def test_no_spelling_of_a_path_passes_the_proxy(running):
    answers = outsider(running, "court", "paths", running.address, "authority.pem")
    passed = {path: line for path, line in answers.items() if line.split()[1] not in {"400", "403"}}
    assert not passed


def test_the_log_of_the_proxy_is_rotated(running, tmp_path):
    """Rotate it as in docs/operations.md, while SuperNodes continue to send requests."""
    rotate = shutil.which("logrotate", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if rotate is None:
        reason = "logrotate is not installed"
        (pytest.fail if "CHAMBERS_CI" in os.environ else pytest.skip)(reason)
    host = running.hosts["coordinator"]
    log = host.folder / "proxy" / "access.log"
    # The proxy's user can't enter pytest's folders.
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    content = (CHECKOUT / "docker" / "logrotate.conf").read_text()
    content = content.replace("/srv/chambers/proxy/access.log", str(log))
    config = tmp_path / "logrotate.conf"
    config.write_text(content.replace("su chambers chambers", f"su {user} {group}"))
    before = log.read_text().splitlines()
    command = [rotate, "--force", "--state", str(tmp_path / "state"), str(config)]
    subprocess.run(command, check=True, cwd=tmp_path)
    rotated = log.with_name("access.log.1").read_text().splitlines()
    assert rotated[: len(before)] == before
    wait_until(lambda: log.stat().st_size, 60)
    line = log.read_text().splitlines()[0]
    assert line not in before and "/v1/fleet/" in line


def test_only_the_public_ports_are_reached(running):
    coordinator, court = running.hosts["coordinator"], running.hosts["court"]
    if not coordinator.namespace:
        pytest.skip("without namespaces, all hosts share one network")
    inner = [f"{coordinator.address}:{number}" for number in (8000, 8001, 8002)]
    assert outsider(running, "court", "ports", *inner, running.address) == [running.address]
    assert outsider(running, "coordinator", "ports", f"{court.address}:9094") == []
