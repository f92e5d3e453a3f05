"""The commands of docs/deployment.md, word for word, with a folder for each organisation."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files

from server_app.main import STRATEGIES
from tests.chambers.site.deployment import APP
from tests.conftest import write_checkpoint, write_rows
from tests.deployment.deployment import CHECKOUT
from tests.deployment.hosts import namespaces_permitted
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (CHECKOUT / "docs" / "deployment.md").read_text()
# The organisation's name follows the language; "up" marks programs that run in the foreground.
BLOCKS = re.findall(r"^```sh (\w+)( up)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INSTITUTIONS = ("court", "consultation")
SECONDS = 600


class Walk:
    """Organisations' folders, and a network in which the coordinator has its name."""

    def __init__(self, folder: Path, namespace: str, model: Path):
        self.folder, self.model, self.programs = folder, model, []
        self._enter = ["ip", "netns", "exec", namespace]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"PATH": path, "PYTHONPATH": str(CHECKOUT)}
        self._environment["PYTHONUNBUFFERED"] = "1"

    def start(self, organisation: str, block: str) -> tuple[subprocess.Popen, Path]:
        """Start a block's commands in an organisation's folder; return the process and its log."""
        for placeholder, value in {
            "/data/legal": self.folder / "data" / organisation,
            "/models/qwen": self.model,
        }.items():
            block = block.replace(placeholder, str(value))
        if organisation in INSTITUTIONS:
            block = block.replace("court", organisation)
        log = self.folder / f"{organisation}-{len(self.programs)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self._enter, "bash", "-euc", block],
                cwd=self.folder / organisation,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.programs.append(process)
        return process, log

    def start_until(
        self, organisation: str, block: str, text: str
    ) -> tuple[subprocess.Popen, Path]:
        """Start a block's commands, and wait until their output contains a text."""
        process, log = self.start(organisation, block)
        wait_until(lambda: process.poll() is not None or text in log.read_text(), 600)
        assert process.poll() is None, log.read_text()
        return process, log

    def run(self, organisation: str, block: str, status: int = 0) -> str:
        process, log = self.start(organisation, block)
        assert process.wait(SECONDS) == status, f"{block}\n{log.read_text()[-3000:]}"
        return log.read_text()


@contextmanager
def network():
    """Yield a network namespace with unused ports, in which the coordinator's name is known."""
    name = f"chambers-{os.getpid()}-walk"
    names = Path("/etc/netns", name)
    names.mkdir(parents=True)
    (names / "hosts").write_text("127.0.0.1 localhost coordinator.example.org\n")
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    try:
        yield name
        # Whatever has been started ends with `chambers site up`.
        listing = ["ip", "netns", "pids", name]
        assert not subprocess.run(listing, check=True, capture_output=True).stdout
    finally:
        listing = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True)
        for process in listing.stdout.split():
            os.kill(int(process), 9)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        shutil.rmtree(names)


@pytest.fixture
def walk(nginx, tmp_path_factory):
    if not namespaces_permitted():
        pytest.skip("the ports of the walk may be taken: network namespaces are not permitted")
    with tempfile.TemporaryDirectory(prefix="chambers-walk-") as name, network() as namespace:
        folder = Path(name)
        for seed, institution in enumerate(INSTITUTIONS):
            write_rows(folder / "data" / institution / "train.jsonl", 16, seed)
            write_rows(folder / "data" / institution / "test.jsonl", 4, 100 + seed)
            (folder / institution).mkdir()
        for organisation in ("coordinator", "reviewer"):
            (folder / organisation).mkdir()
        walk = Walk(folder, namespace, write_checkpoint(folder / "model", blocks=4))
        with ExitStack() as stack:
            stack.callback(lambda: [end(process) for process in walk.programs])
            yield walk


def end(process):
    """Interrupt a program, as Ctrl-C does."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.nightly
def test_make_deployment(walk):
    script = CHECKOUT / "examples" / "deployment.sh"
    said = walk.run("coordinator", f"{script} trial")
    assert said.count(" online ") == 2 and "Averaged the adapters of consultation, court" in said


def join(walk, name, commands):
    """Run an institution's commands: it waits until the coordinator has admitted it."""
    admitted = next(block for _, _, block in BLOCKS if "site admit" in block)
    folder, coordinator = walk.folder / name, walk.folder / "coordinator"
    for file in (coordinator / "for-institutions").iterdir():
        shutil.copy(file, folder)
    shutil.copy(walk.folder / "reviewer" / "trusted.yaml", folder)
    process, log = walk.start_until(name, commands, "waiting for")
    shutil.copy(folder / "node.pub", coordinator / f"{name}.pub")
    walk.run("coordinator", admitted.replace("court", name))
    assert process.wait(120) == 0, log.read_text()


@pytest.mark.parametrize(
    "strategies",
    [["fedjudge-base"], pytest.param([*STRATEGIES], marks=pytest.mark.nightly)],
    ids=len,
)
def test_the_commands_of_the_page_lead_to_runs_of_each_strategy(walk, strategies):
    coordinator = walk.folder / "coordinator"
    for organisation, foreground, commands in BLOCKS:
        named = re.search(r"strategy=([\w-]+)", commands)
        if (named and named[1] not in strategies) or "site admit" in commands:
            continue
        hosts = INSTITUTIONS if organisation == "institution" else [organisation]
        for host in hosts:
            if foreground:
                ready = "startup complete" if host == "coordinator" else "SuperNode ID: "
                walk.start_until(host, f"exec {commands}", ready)
            elif "site join" in commands:
                join(walk, host, commands)
            else:
                said = walk.run(host, commands)
                for name in INSTITUTIONS if "chambers run" in commands else ():
                    assert f"1200 training rows are agreed on with {name}" in said
        if organisation == "reviewer":
            shutil.copytree(walk.folder / "reviewer" / "release", coordinator / "release")
    results = (coordinator / "state" / ".local/share/chambers/runs").iterdir()
    assert {result.name.rpartition("_")[2] for result in results} == set(strategies)
    assert walk.run("coordinator", "chambers site nodes").count(" online ") == 2
    stop_two_runs(walk)
    # A run that fails, and a release of something else.
    said = walk.run("coordinator", "chambers run run.toml rounds=30", status=1)
    assert "the site's policy refuses rounds = 30 (max-rounds = 20)" in said.splitlines()[-1]
    (walk.folder / "tiny.fab").write_bytes(build_fab_from_files(APP)[0])
    walk.run("reviewer", "chambers site sign ../tiny.fab --key key --output ../coordinator/release")
    said = walk.run("coordinator", "chambers run run.toml", status=2)
    assert "the proxy serves @courts/tiny==1.0.0, but @chambers/chambers==" in said


def stop_two_runs(walk):
    """Runs continue after Ctrl-C; the commands that are then shown report on them and stop them."""
    stop, watch = [], []
    for shown in ("2 clients take part", "started run"):
        process, log = walk.start_until("coordinator", "exec chambers run run.toml rounds=9", shown)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        stop += re.findall(r"to stop it: (chambers stop (\d+) .*)", log.read_text())
        watch += re.findall(r"to watch it: (.*) --watch", log.read_text())
    assert "running: " in walk.run("reviewer", watch[0])
    said = walk.run("coordinator", "chambers stop", status=2)
    assert all(run in said for _, run in stop)
    assert f"run {stop[0][1]} is stopped" in walk.run("reviewer", stop[0][0])
    assert f"run {stop[1][1]} is stopped" in walk.run("coordinator", "chambers stop")
    said = walk.run("coordinator", "chambers stop", status=2)
    assert "no runs are in progress" in said
