"""Attacks on what lies between Chambers and Flower, nginx, and the users of a machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.deployment.deployment import CHECKOUT
from tests.deployment.faults import wait_for_end
from tests.deployment.hosts import USER
from tests.deployment.supervisor import all_active
from tests.deployment.test_hostile_institution import Attack, accepted, refusals
from tests.deployment.test_hosts import OUTSIDER
from tests.deployment.test_survival import SECONDS, audited
from tests.marks import nightly
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
THIEF = Path(__file__).with_name("thief.py")
LONG = {"strategy": "fedjudge-base", "rounds": 2, "min-nodes": 1, "train.local-steps": 100}
# A relay that accepts and closes connections, as docker-proxy does while its container restarts.
RELAY = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 8443))
listener.settimeout(0.5)
end = time.monotonic() + 8
while time.monotonic() < end:
    try:
        listener.accept()[0].close()
    except TimeoutError:
        pass
"""


@pytest.fixture
def separate(running):
    """Skip the test if all hosts share one network and one user."""
    if not running.hosts["court"].namespace:
        pytest.skip("namespaces are not permitted")
    return running


def requests_since(running, moment: float) -> set[str]:
    """Return the addresses whose requests were answered after a time, from the proxy's log."""
    log = (running.hosts["coordinator"].folder / "proxy" / "access.log").read_text()
    lines = re.findall(r'^(\S+) \[(\S+)\] "POST /v1/fleet/\S* 200 ', log, flags=re.MULTILINE)
    return {address for address, at in lines if datetime.fromisoformat(at).timestamp() > moment}


def wait_until_both_return(running, moment: float) -> None:
    names = running.institutions
    addresses = {running.hosts[name].address for name in names}
    wait_until(lambda: requests_since(running, moment) >= addresses, 60)
    wait_until(lambda: all_active(running), 60)
    assert all(running.programs[name]["supernode"].running for name in names)


def test_silent_connections_take_nobody_offline(separate):
    """Twenty seconds of this took both SuperNodes offline for good, without a line in a log."""
    running, host = separate, separate.hosts["outsider"]
    beside = running.programs["court"]["supernode"]
    view = replace(
        beside.view, mounts={}, environment=beside.view.environment | {"PYTHONPATH": str(CHECKOUT)}
    )
    command = [sys.executable, str(OUTSIDER), "silent", running.address, "30"]
    said = host.run(command, view, seconds=120).stdout
    assert int(said.splitlines()[-1]) > 2000
    wait_until_both_return(running, time.time())
    log = running.programs["coordinator"]["proxy"].output()
    assert re.search(rf"limiting connections by zone .*client: {re.escape(host.address)},", log)


@pytest.mark.nightly
def test_a_relay_that_closes_connections_takes_nobody_offline(separate):
    running, host = separate, separate.hosts["coordinator"]
    proxy = running.programs["coordinator"]["proxy"]
    proxy.stop()
    relay = [sys.executable, "-c", RELAY, host.address]
    host.run(relay, replace(proxy.view, mounts={}), seconds=60)
    proxy.start()
    proxy.wait_until_ready()
    wait_until_both_return(running, time.time())
    assert "Connection attempt failed, retrying" in running.programs["court"]["supernode"].output()


def thief(running, *arguments: str, user: int = 65534):
    """Run thief.py as another user of the court's host, who sees its network and processes."""
    host, beside = running.hosts["court"], running.programs["court"]["superexec"]
    command = [sys.executable, str(THIEF), *arguments]
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    # The interpreter may be in a folder that only root can read; reading processes needs no more.
    capability = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    ended = subprocess.run(
        ["ip", "netns", "exec", host.namespace, *become, *(capability if user else []), *command],
        env=beside.view.environment | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("flower", [nightly(True), False], ids=["Flower's", "Chambers'"])
def test_another_user_of_the_machine_finds_no_token(separate, flower):
    """With Flower's own SuperExec, the same search finds one."""
    running, superexec = separate, separate.programs["court"]["superexec"]
    own = superexec.command
    superexec.stop()
    superexec.command = ["flower-superexec", *own[1:]] if flower else own
    superexec.start()
    try:
        run = running.submit(LONG)
        wait_until(lambda: processes(superexec, "flwr-clientapp"), SECONDS)
        found = thief(running, "look", "flwr-clientapp")
        running.flwr("stop", str(run), "deployment")
    finally:
        superexec.stop()
        superexec.command = own
        superexec.start()
    assert bool(found) is flower
    assert thief(running, "take", "127.0.0.1:9094") == 401


def processes(program, name):
    found = []
    for process in program.processes():
        with suppress(psutil.Error):  # it has ended
            if any(name in word for word in process.cmdline()):
                found.append(process)
    return found


@pytest.mark.nightly
def test_a_replaced_context_decides_nothing(separate):
    """Root takes the token, in place of a user who would have found a way."""
    running, court = separate, separate.hosts["court"]
    superexec = running.programs["court"]["superexec"]
    before, seen = len(audited(court)), len(accepted(court))
    forged = {"name": "tribunal", "policy": "/srv/policy.toml"}
    attack = Attack(running, running.submit(LONG))
    own = (str(attack.run), str(attack.nodes["court"]), json.dumps(forged))

    def replaced() -> bool:
        tokens = thief(running, "look", "flwr-clientapp", user=0)
        return any(thief(running, "replace", "127.0.0.1:9094", t, *own) == 200 for t in tokens)

    wait_until(lambda: accepted(court)[seen:] and processes(superexec, "flwr-clientapp"), SECONDS)
    wait_until(replaced, SECONDS)
    wait_until(lambda: refusals(court, before), SECONDS)
    wait_for_end(running)
    problem = "Flower's node config differs from the site file (name, policy)"
    assert all(problem in said for said in refusals(court, before))
    replied = [e for e in audited(court)[before:] if e["event"] == "reply" and "arrays" in e]
    assert not replied


def test_the_rules_of_nftables_keep_other_users_from_the_ports(separate):
    if not shutil.which("nft"):
        (pytest.fail if "CHAMBERS_CI" in os.environ else pytest.skip)("nftables is not installed")
    running, host = separate, separate.hosts["coordinator"]
    enter = ["ip", "netns", "exec", host.namespace]

    def reach(user: int) -> bool:
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        words = [*enter, *become, "/usr/bin/env", "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000"]
        return subprocess.run(words, check=False, capture_output=True).returncode == 0

    assert reach(65534)
    rules = str(CHECKOUT / "docker" / "nftables.conf")
    for _ in range(2):  # loading them again replaces them
        subprocess.run([*enter, "nft", "--define", f"user={USER}", "--file", rules], check=True)
    try:
        assert not reach(65534) and reach(USER) and reach(0)
        assert all_active(running)
    finally:
        subprocess.run([*enter, "nft", "delete", "table", "inet", "chambers"], check=True)
