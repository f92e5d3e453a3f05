"""The commands of docs/deployment.md, word for word, with three folders as three hosts."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from server_app.main import STRATEGIES
from tests.conftest import write_checkpoint, write_rows
from tests.deployment.deployment import CHECKOUT, COMPLETED
from tests.deployment.hosts import namespaces_permitted

pytestmark = pytest.mark.slow
PAGE = (CHECKOUT / "docs" / "deployment.md").read_text()
# The host's name follows the language.
BLOCKS = re.findall(r"^```sh (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SECONDS = 600


@contextmanager
def machine():
    """Yield a prefix with which a command runs in a network namespace with unused ports."""
    name = f"chambers-{os.getpid()}-walk"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    try:
        yield ["ip", "netns", "exec", name]
    finally:
        listing = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True)
        for process in listing.stdout.split():
            os.kill(int(process), 9)
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.fixture
def folder():
    """Create a folder that nginx's user can enter, unlike pytest's folders."""
    made = Path(tempfile.mkdtemp(prefix="chambers-walk-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    "strategies", [["fl-glm"], pytest.param([*STRATEGIES], marks=pytest.mark.nightly)], ids=len
)
def test_the_commands_of_the_page_lead_to_runs_of_each_strategy(nginx, folder, strategies):
    if not namespaces_permitted():
        pytest.skip("the ports of the walk may be taken: network namespaces are not permitted")
    for seed, name in enumerate(("court", "consultation")):
        write_rows(folder / "data" / name / "train.jsonl", 12, seed)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT),
        "CHAMBERS": str(CHECKOUT),
        "MODEL": str(write_checkpoint(folder / "model", blocks=4)),
        "DATA": str(folder / "data"),
    }
    said = ""
    with machine() as enter:
        for host, commands in BLOCKS:
            named = re.search(r"sed 's/fl-glm/([\w-]+)/", commands)
            if named and named[1] not in strategies:
                continue
            # Each block runs in a new shell, so read the host's environment again.
            again = "if [ -f flower.env ]; then set -a; . ./flower.env; set +a; fi\n"
            # Wait until the SuperLink is up, as a reader would.
            if commands.startswith("flwr supernode"):
                again += "for i in $(seq 100); do flwr ls deployment > /dev/null && break; done\n"
            elif commands.startswith("chambers site check"):
                attempt = f"{{ {commands}}} > /dev/null"
                again += f"for i in $(seq 30); do {attempt} && break; sleep 1; done\n"
            result = subprocess.run(
                [*enter, "bash", "-euc", again + commands],
                cwd=folder if host == "trial" else folder / host,
                env=environment,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=SECONDS,
            )
            assert result.returncode == 0, f"{commands}\n{result.stdout}"
            said += result.stdout
        listing = subprocess.run(
            [
                *enter,
                "bash",
                "-euc",
                "set -a; . ./flower.env; set +a; flwr ls deployment --format=json",
            ],
            cwd=folder / "coordinator",
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    runs = json.loads(listing)["runs"]
    assert [run["status"] for run in runs] == [COMPLETED] * len(strategies), said
    results = (folder / "coordinator" / "state" / ".local/share/chambers/runs").iterdir()
    assert {result.name.rpartition("_")[2] for result in results} == set(strategies)
