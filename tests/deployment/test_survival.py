"""Runs survive killed processes, lanes that are cut, and a wrong clock at a site."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from federation.run_folder import METRICS_FILE, read_events
from tests.deployment.conftest import explained, results
from tests.deployment.deployment import CHECKOUT, COMPLETED
from tests.deployment.faults import newest_run, resume, wait_for_end
from tests.deployment.hosts import Host, cut
from tests.deployment.supervisor import supervised
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
BLOCK_SERVER = 9000
# Use many steps, so that the lane is cut during training.
LANES = {
    "strategy": "fl-glm",
    "rounds": 1,
    "train.local-steps": 200,
    "train.batch-size": 2,
    "train.accumulation": 1,
    "split.resume-timeout": 150.0,
    "round-timeout": 400.0,
}
# A SuperNode that is killed in round 1 returns during a later round.
ROUNDS = {
    "strategy": "fedjudge-base",
    "rounds": 4,
    "min-nodes": 1,
    "train.local-steps": 100,
    "train.batch-size": 2,
    "train.accumulation": 1,
    "evaluate.every": 4,
}
SECONDS = 900.0  # a limit, for machines under load


@pytest.mark.nightly
def test_a_killed_supernode_takes_part_in_a_later_round(running):
    supernode, court = running.programs["court"]["supernode"], running.hosts["court"]
    accepted, active = trainings(court), supernode.output().count("SuperNode ID: ")
    before = newest_run(running)
    running.submit(ROUNDS)
    wait_until(lambda: trainings(court) > accepted, SECONDS)
    supernode.kill()
    # The SuperLink refuses the key until it notices that the first SuperNode has ended.
    said = len(supernode.output())
    supernode.start()
    wait_until(lambda: not supernode.running, SECONDS)
    explained(supernode.output()[said:], "[code: 2004] Failed to activate SuperNode.")
    wait_until(lambda: newest_run(running) != before and rounds(running), SECONDS)
    supernode.start()
    running.wait_until_active("court", active + 1)
    assert wait_for_end(running) == COMPLETED
    first, *_, last = rounds(running)
    assert first["participants"] == ["consultation"]
    reason = "its SuperNode is no longer connected"
    assert first["left_out"] == [{"client": "court", "reason": reason}]
    assert last["participants"] == ["consultation", "court"]


@pytest.mark.nightly
def test_a_run_with_a_killed_serverapp_is_resumed(running):
    before = newest_run(running)
    settings = ROUNDS | {"strategy": "fedprox", "fedprox.mu": 0.1, "rounds": 2, "min-nodes": 2}
    running.submit(settings)
    wait_until(lambda: newest_run(running) != before and rounds(running), SECONDS)
    with supervised(running, "ServerApp", 0.0):
        assert wait_for_end(running) == "finished:failed: No heartbeat received from the task"
    assert [event["round"] for event in rounds(running)] == [1]
    assert resume(running, settings) == COMPLETED
    assert [event["round"] for event in rounds(running)] == [1, 2]
    assert all(event["participants"] == ["consultation", "court"] for event in rounds(running))


def rounds(running) -> list[dict]:
    """Return the finished rounds of the newest run."""
    events = read_events(newest_run(running) / METRICS_FILE)
    return [event for event in events if event["event"] == "round"]


@pytest.mark.nightly
def test_a_split_run_survives_a_minute_without_connections(running):
    """The proxy is restarted after 5 s, and the SuperLink, with its database, after 15 s."""
    court, coordinator = running.hosts["court"], running.programs["coordinator"]
    running.submit(LANES)
    wait_until(lambda: trains(court), SECONDS)
    with cut(court, BLOCK_SERVER) if court.namespace else nullcontext():
        over = time.monotonic() + 60
        for name, seconds in (("proxy", 5), ("superlink", 15)):
            coordinator[name].kill()
            time.sleep(seconds)
            coordinator[name].start()
        coordinator["proxy"].wait_until_ready()
        assert not running.status().startswith("finished")
        time.sleep(max(0.0, over - time.monotonic()))
    assert wait_for_end(running) == COMPLETED
    events = read_events(results(running) / METRICS_FILE)
    (round_,) = (event for event in events if event["event"] == "round")
    assert round_["participants"] == ["consultation", "court"]
    lanes = {event["client"]: event["lanes"] for event in events if event["event"] == "train"}
    assert lanes["consultation"] == 1
    assert lanes["court"] > 1 or not court.namespace


def trains(host: Host) -> bool:
    """Return whether an institution is connected to the block server."""
    if not any(line["event"] == "lane" and line["kind"] == "train" for line in audited(host)):
        return False
    inside = ["ip", "netns", "exec", host.namespace] if host.namespace else []
    connected = ["ss", "-Htn", "state", "established", "dport", "=", f":{BLOCK_SERVER}"]
    return subprocess.run([*inside, *connected], check=True, capture_output=True).stdout != b""


def trainings(host: Host) -> int:
    """Return the number of training rounds that an institution has begun."""
    return sum(line["event"] == "accepted" and line["kind"] == "train" for line in audited(host))


def audited(host: Host) -> list[dict]:
    """Return the complete lines of an institution's audit log."""
    lines = []
    for log in (host.folder / "state").rglob("audit.jsonl"):
        lines += log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Return a function that changes a view so that its programs' clocks are ahead."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler to make another clock with")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    def ahead(view, seconds):
        shifted = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(seconds)}
        return replace(view, environment=view.environment | shifted)

    return ahead


@pytest.mark.parametrize("seconds", [3600, pytest.param(-3600, marks=pytest.mark.nightly)])
def test_a_site_with_a_wrong_clock_is_refused(running, clock, tmp_path, seconds):
    program = running.programs["court"]["supernode"]
    host, view = program.host, clock(program.view, seconds)
    said = host.run([*program.command, "--port=9095"], view, seconds=60).stdout
    explained(said, "SuperNode terminated gracefully.")
    court = tmp_path / "court"
    (court / "state").mkdir(parents=True)
    for name in ("authority.pem", "node", "trusted.yaml", "policy.toml"):
        (court / name).symlink_to(host.folder / name)
    (court / "institution.env").write_text(f"COORDINATOR={running.address}\n")
    inside = ["ip", "netns", "exec", host.namespace] if host.namespace else []
    checked = subprocess.run(
        [*inside, sys.executable, "-m", "chambers", "site", "check"],
        cwd=court,
        env=view.environment | {"PYTHONPATH": str(CHECKOUT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = (line for line in checked.stdout.splitlines() if "clock:" in line)
    where = "ahead of" if seconds > 0 else "behind"
    assert line.startswith("fix  clock: about 3")
    assert f"{where} the coordinator's; beyond 5 s ahead or 300 s behind, the SuperLink" in line
