"""The app as institutions run it: a SuperLink, SuperNodes, and a process for each message."""

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from chambers.__main__ import main
from chambers.superlink import private_superlink, run_app
from federation.run_folder import METRICS_FILE, read_events
from federation.site_file import VARIABLE
from tests.client_app.worker_process import RunningWorker, running_worker
from tests.site_files import write_site
from tests.strategies.grids import same
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
NAMES = ("alpha", "beta", "gamma")
UNSIGNED = {"instruction-key": "none"}
pytestmark = pytest.mark.slow

# With this rank, adapter and Adam's moments take more than 200 MB per client, which Flower's state
# lost without an error.
RANK = 56_000


def start_supernode(link, site: Path) -> subprocess.Popen:
    """Start the SuperNode of a site file, with its log beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with site.with_name("node.log").open("wb") as output:
        return subprocess.Popen(
            [
                *("flower-supernode", "--insecure", "--superlink", link.address),
                *("--host", "127.0.0.1", "--port", str(port)),
            ],
            env=link.environment | {VARIABLE: str(site)},
            stdout=output,
            stderr=output,
        )


def new_site(folder: Path, name: str, data: Path, **other: Path) -> Path:
    """Write a site file into a new folder with the institution's name."""
    (folder / name).mkdir()
    return write_site(folder / name, name, data, **other)


@pytest.mark.nightly
def test_supernodes_train_together_and_keep_large_states(
    checkpoint, client_folders, tmp_path, capfd
):
    config = {
        "rounds": 2,
        "evaluate.every": 2,
        "min-nodes": 2,
        "model.name": str(checkpoint),
        "adapter.rank": RANK,
        "adapter.targets": "q_proj,k_proj,v_proj",
        "adapter.alpha": RANK,
        "train.optimizer-state": "keep",
        "train.local-steps": 2,
        "output-dir": str(tmp_path / "runs"),
        "state-path": str(tmp_path / "state"),
    }
    with private_superlink(tmp_path / "flower", simulated=False) as link:
        nodes = [
            start_supernode(link, new_site(tmp_path, name, client_folders / name))
            for name in NAMES[:2]
        ]
        status = run_app(ROOT, link, UNSIGNED | config)
        shown = capfd.readouterr().out
        assert status == "finished:completed", shown
        assert all(node.poll() is None for node in nodes)
    (directory,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["participants"] for event in rounds] == [list(NAMES[:2])] * 2
    assert [event["left_out"] for event in rounds] == [[], []]
    (lineage,) = (tmp_path / "state").iterdir()
    for name in NAMES[:2]:
        files = list((lineage / name / "round-0002").iterdir())
        assert sum(file.stat().st_size for file in files) > 200e6
        # Round 2 continued with round 1's optimizer, in a different process.
        with safe_open(lineage / name / "round-0002" / "optimizer.safetensors", "pt") as state:
            steps = {float(state.get_tensor(k)) for k in state.keys() if k.endswith(":step")}  # noqa: SIM118
        assert steps == {4.0}
        for kind in ("global", "personalised"):
            assert (lineage / name / "adapters" / kind / "adapter_model.safetensors").is_file()


@pytest.mark.nightly
def test_three_supernodes_train_a_split_model(deep_checkpoint, client_folders, tmp_path, capfd):
    """Each message's process opens its own lane; optimizers continue at both ends."""
    config = {
        "strategy": "fl-glm",
        "rounds": 2,
        "evaluate.every": 2,
        "min-nodes": 3,
        "model.name": str(deep_checkpoint),
        "train.optimizer-state": "keep",
        "train.local-steps": 2,
        "output-dir": str(tmp_path / "runs"),
        "state-path": str(tmp_path / "state"),
    }
    with private_superlink(tmp_path / "flower", simulated=False) as link:
        for name in NAMES:
            start_supernode(link, new_site(tmp_path, name, client_folders / name))
        status = run_app(ROOT, link, UNSIGNED | config)
        assert status == "finished:completed", capfd.readouterr().out
    (directory,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["participants"] for event in rounds] == [list(NAMES)] * 2
    with safe_open(directory / "checkpoints" / "round-0002.safetensors", "pt") as state:
        names = [k for k in state.keys() if k.endswith(":step")]  # noqa: SIM118
        # The body's optimizer has taken every client's steps.
        assert {float(state.get_tensor(name)) for name in names} == {12.0}
    (lineage,) = (tmp_path / "state").iterdir()
    for name in NAMES:
        with safe_open(lineage / name / "round-0002" / "optimizer.safetensors", "pt") as state:
            steps = {float(state.get_tensor(k)) for k in state.keys() if k.endswith(":step")}  # noqa: SIM118
        assert steps == {4.0}
        for kind in ("global", "personalised"):
            assert (lineage / name / "adapters" / kind / "adapter_model.safetensors").is_file()


@pytest.mark.nightly
def test_sites_refuse_and_no_error_quotes_a_row(checkpoint, client_folders, tmp_path, capfd):
    """A SuperNode sends a policy's reason, and no error's text that quotes a row."""
    word = "Xanthippe"
    shutil.copytree(client_folders / "alpha", tmp_path / "alpha")
    row = {"instruction": f"{word} asks", "output": "answer"}
    (tmp_path / "alpha" / "train.jsonl").write_text(json.dumps(row) + "\n")
    quoting = tmp_path / "quoting"
    shutil.copytree(checkpoint, quoting)
    (quoting / "chat_template.jinja").write_text(
        "{{ raise_exception('odd turn: ' + messages[0]['content']) }}"
    )
    policy, audit = tmp_path / "policy.toml", tmp_path / "audit.jsonl"
    policy.write_text(f'audit-log = "{audit}"\npaths = ["{tmp_path}"]\nmax-rounds = 1\n')
    config = {
        "min-nodes": 2,
        "model.name": str(quoting),
        "output-dir": str(tmp_path / "runs"),
        "state-path": str(tmp_path / "state"),
    }
    with private_superlink(tmp_path / "flower", simulated=False) as link:
        start_supernode(link, write_site(tmp_path / "alpha", "alpha", tmp_path / "alpha"))
        start_supernode(link, new_site(tmp_path, "beta", client_folders / "beta", policy=policy))
        assert run_app(ROOT, link, UNSIGNED | config).startswith("finished:failed")
        shown = capfd.readouterr().out
    assert "alpha/train.jsonl:1: the chat template rejects this row" in shown
    assert "the site's policy refuses rounds = 5 (max-rounds = 1)" in shown
    own_log = (tmp_path / "alpha" / "node.log").read_text()
    assert f"odd turn: {word}" in own_log
    assert "This site's file names no policy" in own_log
    assert word not in shown
    for file in (tmp_path / "flower").rglob("*"):
        assert not file.is_file() or word.encode() not in file.read_bytes(), file
    (line,) = map(json.loads, audit.read_text().splitlines())
    assert line["client"] == "beta" and "max-rounds = 1" in line["problem"]


@pytest.mark.nightly
def test_a_slow_node_is_waited_for_or_left_out(checkpoint, client_folders, tmp_path, capfd):
    """Beta's worker is paused 90 % of the time; the second run has a shorter time limit."""
    runs = tmp_path / "runs"
    config = {
        "rounds": 1,
        "min-nodes": 2,
        "model.name": str(checkpoint),
        "train.local-steps": 200,
        "train.accumulation": 1,
        "output-dir": str(runs),
        "state-path": str(tmp_path / "state"),
    }
    with private_superlink(tmp_path / "flower", simulated=False) as link, ExitStack() as stack:
        for name in NAMES[:2]:
            (own := tmp_path / name).mkdir()
            worker = stack.enter_context(running_worker(own, client_folders / name, name))
            start_supernode(link, own / "site.toml")
        stack.enter_context(slowed(worker))
        assert run_app(ROOT, link, UNSIGNED | config) == "finished:completed"
        (waited,) = runs.iterdir()
        events = read_events(waited / METRICS_FILE)
        seconds = {e["client"]: e["seconds"] for e in events if e["event"] == "train"}
        assert seconds["beta"] > 4 * seconds["alpha"]
        config |= {"min-nodes": 1, "round-timeout": 4 * seconds["alpha"]}
        assert run_app(ROOT, link, UNSIGNED | config) == "finished:completed"
    (left,) = set(runs.iterdir()) - {waited}
    capfd.readouterr()
    assert main(["status", str(waited)]) == main(["status", str(left)]) == 0
    of_waited, of_left = capfd.readouterr().out.split("Run ")[1:]
    assert "took part in round 1" in of_waited and "OUT" not in of_waited
    assert "OUT of round 1" in of_left and "time limit expired" in " ".join(of_left.split())


@contextmanager
def slowed(worker: RunningWorker) -> Iterator[None]:
    """Once a worker has begun to train, pause it for 90 % of the time."""
    process, over = worker.process, Event()

    def hold() -> None:
        while worker.answered() < 2 and not over.wait(0.05):  # the first message is an evaluation
            pass
        # Pause often, because a process gets more time on a busy processor after a long pause.
        while not over.wait(0.1):
            process.send_signal(signal.SIGSTOP)
            over.wait(0.9)
            process.send_signal(signal.SIGCONT)

    thread = Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
def test_a_reply_after_the_time_limit_is_averaged(checkpoint, client_folders, tmp_path, capfd):
    """Beta's worker is paused in round 1 until the round has ended without it."""
    runs, state, kinds = tmp_path / "runs", tmp_path / "state", {"round", "late"}
    config = {
        "strategy": "fedjudge-base",
        "rounds": 2,
        "min-nodes": 1,
        "round-timeout": 60.0,
        "late-replies": True,
        "model.name": str(checkpoint),
        "train.local-steps": 20,
        "train.checkpoint-minutes": 1e-9,
        "output-dir": str(runs),
        "state-path": str(state),
    }

    def rounds() -> list[dict]:
        return [
            e for f in runs.glob(f"*/{METRICS_FILE}") for e in read_events(f) if e["event"] in kinds
        ]

    with private_superlink(tmp_path / "flower", simulated=False) as link, ExitStack() as stack:
        for name in NAMES[:2]:
            (own := tmp_path / name).mkdir()
            worker = stack.enter_context(running_worker(own, client_folders / name, name))
            start_supernode(link, own / "site.toml")

        def pause() -> None:
            wait_until(lambda: [*state.glob("*/beta/unfinished/progress.json")], 300)
            worker.process.send_signal(signal.SIGSTOP)
            try:
                wait_until(rounds, 300)
            finally:
                worker.process.send_signal(signal.SIGCONT)

        with ThreadPoolExecutor() as pool:
            paused = pool.submit(pause)
            assert run_app(ROOT, link, UNSIGNED | config) == "finished:completed"
            paused.result()
    capfd.readouterr()
    found = [(e["event"], e["round"], e["participants"]) for e in rounds()]
    both = list(NAMES[:2])
    assert found == [("round", 1, ["alpha"]), ("late", 1, both), ("round", 2, both)]


@pytest.mark.nightly
def test_resident_workers_answer_as_processes_do(checkpoint, client_folders, tmp_path, capfd):
    """Workers run the code that Flower installs from the app, and give the same adapters."""
    adapters = []
    for kind in ("processes", "workers"):
        folder = tmp_path / kind
        config = {
            "rounds": 2,
            "min-nodes": 2,
            "model.name": str(checkpoint),
            "train.local-steps": 2,
            "output-dir": str(folder / "runs"),
            "state-path": str(folder / "state"),
        }
        with private_superlink(folder, simulated=False) as link, ExitStack() as stack:
            workers = {}
            for name in NAMES[:2]:
                (own := folder / name).mkdir()
                site = write_site(own, name, client_folders / name)
                if kind == "workers":
                    worker = running_worker(own, client_folders / name, name)
                    workers[name] = stack.enter_context(worker)
                start_supernode(link, site)
            status = run_app(ROOT, link, UNSIGNED | config)
            assert status == "finished:completed", capfd.readouterr().out
            for name, worker in workers.items():
                # Two rounds of training and evaluation, and an evaluation before them.
                assert worker.answered() == 5
                assert "this process answers" not in (folder / name / "node.log").read_text()
        (run,) = (folder / "runs").iterdir()
        adapters.append(load_file(run / "adapters" / "global" / "adapter_model.safetensors"))
    assert same(*adapters)
