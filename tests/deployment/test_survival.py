"""What a run survives: programs that end, a lane that is cut, and a site's clock that is wrong."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from bench.deployment.deployment import CHECKOUT, COMPLETED
from bench.deployment.hosts import Host, cut
from bench.faults import wait_for_end
from strategies.run_folder import METRICS, read_events
from tests.deployment.conftest import explained, results

pytestmark = pytest.mark.slow
BLOCK_SERVER = 9000
# Many steps, since a cut should fall into them.
LANES = {
    "strategy": "fl-glm",
    "rounds": 1,
    "train.local-steps": 200,
    "train.batch-size": 2,
    "train.accumulation": 1,
    "split.resume-timeout": 150.0,
    "round-timeout": 400.0,
}
SECONDS = 300


def test_a_split_run_goes_on_after_a_minute_without_lane_superlink_and_proxy(running):
    """The SuperLink returns to its database after 15 s, the proxy after 5 s."""
    court, coordinator = running.hosts["court"], running.programs["coordinator"]
    running.submit(LANES)
    wait_until(lambda: trains(court))
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
    events = read_events(results(running) / METRICS)
    (round_,) = (event for event in events if event["event"] == "round")
    assert round_["participants"] == ["consultation", "court"]
    lanes = {event["client"]: event["lanes"] for event in events if event["event"] == "train"}
    assert lanes["consultation"] == 1
    assert lanes["court"] > 1 or not court.namespace


def wait_until(happened) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.5)


def trains(host: Host) -> bool:
    """Return whether an institution has a lane to train over."""
    lines = []
    for log in (host.folder / "state").rglob("audit.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    if not any(line["event"] == "lane" and line["kind"] == "train" for line in lines):
        return False
    inside = ["ip", "netns", "exec", host.namespace] if host.namespace else []
    connected = ["ss", "-Htn", "state", "established", "dport", "=", f":{BLOCK_SERVER}"]
    return subprocess.run([*inside, *connected], check=True, capture_output=True).stdout != b""


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    """Return a function that changes a view, so that its programs' clock is seconds ahead."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler to make another clock with")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    def ahead(view, seconds):
        shifted = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(seconds)}
        return replace(view, environment=view.environment | shifted)

    return ahead


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_site_whose_clock_is_wrong_is_refused_and_its_check_says_so(running, clock, seconds):
    program = running.programs["court"]["supernode"]
    host, view = program.host, clock(program.view, seconds)
    said = host.run([*program.command, "--port=9095"], view, seconds=60).stdout
    explained(said, "SuperNode terminated gracefully.")
    options = {
        "superlink": running.address,
        "root-certificates": "authority.pem",
        "auth-supernode-private-key": "node",
        "trusted-entities": "trusted.yaml",
        "node-config": f'name="court" policy="{host.folder}/policy.toml"',
    }
    inside = ["ip", "netns", "exec", host.namespace] if host.namespace else []
    checked = subprocess.run(
        [
            *(*inside, sys.executable, "-m", "chambers", "site", "check"),
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        cwd=host.folder,
        env=view.environment | {"PYTHONPATH": str(CHECKOUT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (line,) = (line for line in checked.stdout.splitlines() if "clock" in line)
    where = "ahead of" if seconds > 0 else "behind"
    assert line.startswith("fix  clock: about 3")
    assert (
        f"{where} the coordinator's; from 5 s ahead or 300 s behind the SuperLink refuses" in line
    )
