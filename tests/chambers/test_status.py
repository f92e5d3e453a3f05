"""``chambers status``, from the files that real runs write."""

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from chambers.__main__ import main
from chambers.status_server import application
from federation.run_folder import (
    METRICS_FILE,
    RunningError,
    RunStatus,
    is_running,
    running,
    write_status,
)
from strategies.participants import TooFewClientsError
from tests.chambers.conftest import ROOT, refused, write_run
from tests.server_app.runs import serve
from tests.strategies.grids import SpyingGrid

HOSTILE = "[red]\x1b[2J\nState running[/]"


@pytest.fixture
def status(capsys):
    """Return a function that returns the command's exit status and its output as one line."""

    def show(directory, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["status", str(directory), *options])
        return code, " ".join(capsys.readouterr().out.split())

    return show


class Watched(SpyingGrid):
    """Calls ``look`` before each message, and alters beta's reply in the second round."""

    def __init__(self, values, look):
        super().__init__(values, self.spoil)
        self.look, self.seen, self.trained = look, [], 0

    def spoil(self, reply):
        config = reply.content["config"]
        if reply.metadata.message_type == "train" and config["name"] == "beta":
            self.trained += 1
            if self.trained == 2:
                config["problem"] = HOSTILE
            # Metrics may have any name, even one that the server's events use.
            metrics = reply.content["metrics"]
            for name in ("participants", "left-out", "clients", "withheld"):
                metrics[name] = 1.0
            del metrics["tokens"]
        return reply

    def push_messages(self, messages):
        messages = list(messages)
        self.seen.append((messages[0].metadata.message_type, self.look()))
        return super().push_messages(messages)


@pytest.mark.slow
def test_a_run_that_goes_on_and_completes(values, tmp_path, status):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path), "min-nodes": 2}

    def look():
        (directory,) = (tmp_path / "runs").iterdir()
        with (directory / METRICS_FILE).open("ab") as lines:  # as while it is being written
            end = lines.tell()
            lines.write(b'{"event": "tra')
            lines.flush()
            seen = status(directory)
            lines.truncate(end)
        return seen

    grid = Watched(values, look)
    serve(values, grid)
    assert all(code == 0 for _, (code, _) in grid.seen)
    assert "waiting for SuperNodes to register" in grid.seen[0][1][1]
    first, second, third = (text for kind, (_, text) in grid.seen if kind == "train")
    assert "running: training of round 1 of 3" in first and "0 of 3 clients have replied" in first
    assert "unknown until the first round is over" in first
    assert "Checkpoint after round 0" in first
    assert "Time left about " in second and "Checkpoint after round 1" in second
    assert "tokens/s" in second and "OUT" not in second
    assert r"beta 12" in third
    assert r"in training; OUT of round 2: [red]\x1b[2J State running[/]" in third
    (directory,) = (tmp_path / "runs").iterdir()
    code, text = status(directory)
    assert code == 0 and "State completed" in text and "Time left -" in text
    assert "Checkpoint after round 3" in text and "beta 12" in text and "OUT" not in text
    assert not is_running(directory)
    assert not (directory / ".replies").exists()


def test_a_run_that_fails_says_why(values, tmp_path, status):
    values |= {"output-dir": str(tmp_path / "runs"), "state-path": str(tmp_path)}
    with pytest.raises(TooFewClientsError):
        serve(values, Watched(values, lambda: None))
    (directory,) = (tmp_path / "runs").iterdir()
    code, text = status(directory)
    assert code == 1
    assert "failed" in text and "TooFewClientsError: round 2: 2 valid replies" in text
    assert "OUT of round 2: [red]" in text and "\x1b" not in text


def test_who_was_scaled_down_is_shown(checkpoint, tmp_path, status):
    directory = write_run(tmp_path / "run", checkpoint, **{"split.head-blocks": 0})
    scaled = {"event": "scaled", "round": 1, "client": "beta", "what": "update", "factor": 0.00123}
    with (directory / METRICS_FILE).open("a") as lines:
        lines.write(json.dumps(scaled) + "\n")
    _, text = status(directory)
    assert "alpha - - - took part in round 1 beta" in text
    assert "beta - - - took part in round 1; its update was scaled by 0.0012" in text
    late = {"event": "late", "round": 1, "clients": ["gamma"], "participants": ["beta", "gamma"]}
    with (directory / METRICS_FILE).open("a") as lines:
        lines.write(json.dumps(late) + "\n")
    _, text = status(directory)
    assert "beta - - - took part in round 1 gamma - - - took part in round 1 (late)" in text


@pytest.mark.slow
def test_a_killed_run_is_not_taken_for_a_running_one(checkpoint, tmp_path, status):
    directory = write_run(tmp_path / "run", checkpoint, **{"split.head-blocks": 0})
    code = (
        "import sys, time; from pathlib import Path; from federation.run_folder import running\n"
        "with running(Path(sys.argv[1])): print(flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        assert status(directory)[0] == 0
        with pytest.raises(RunningError, match="another run is writing to"), running(directory):
            pass
        with watching(directory) as (watcher, terminal):
            while b"SuperNodes to register" not in os.read(terminal, 1000):
                assert watcher.poll() is None
            process.kill()
            process.wait()
            assert watcher.wait(30) == 1
    finally:
        process.kill()
        process.wait()
    code, text = status(directory)
    assert code == 1 and 'was killed before the run ended; continue with resume = "' in text


@contextmanager
def watching(directory):
    """Run ``chambers status --watch`` in a terminal; yield the process and the other side."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "chambers", "status", "--watch", str(directory)],
        cwd=ROOT,
        stdout=end,
        stderr=end,
        env=os.environ | {"COLUMNS": "200", "TERM": "xterm"},
    )
    os.close(end)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_of_several_runs_the_newest_is_shown(run_folder, tmp_path, status):
    for name in ("2026-01-31_fedprox", "2026-02-01_fedprox"):
        shutil.copytree(run_folder, tmp_path / name)
    assert "2026-02-01_fedprox" in status(tmp_path)[1]


def test_a_folder_of_no_run_is_refused(tmp_path, capsys, base):
    for folder in (tmp_path, base):
        assert "is not the folder of a run" in refused(capsys, "status", folder)
    for name in ("config.json", "versions.json"):
        (tmp_path / name).write_text("{}")
    assert "config.json is not from a run" in refused(capsys, "status", tmp_path)
    (tmp_path / "config.json").write_text('{"strategy": "fedprox", "rounds": 1}')
    (tmp_path / "status.json").write_text('{"round": "two"}')
    assert "can't be read: status.json is damaged\n" in refused(capsys, "status", tmp_path)


@pytest.fixture
def coordinator(tmp_path, small_disk):
    """A coordinator's folder, with a small disk for the database."""
    (tmp_path / "proxy").mkdir()
    (tmp_path / "database").symlink_to(small_disk)
    return tmp_path


def line(address, seconds=0, status=200, size=1_000_000, asked="POST /v1/fleet/push-object"):
    """Return a line of the proxy's log, dated ``seconds`` ago."""
    moment = datetime.now().astimezone() - timedelta(seconds=seconds)
    return f'{address} [{moment.isoformat(timespec="seconds")}] "{asked}" {status} {size} 1 0.123\n'


def test_the_disk_of_the_coordinator_and_its_top_sender(coordinator, checkpoint, status):
    run = write_run(coordinator / "run", checkpoint, **{"split.head-blocks": 0})
    words = (str(run), "--coordinator", str(coordinator))
    _, said = status(*words)
    assert f"GiB free in {run}; LOW: 0.0 GiB free in {coordinator / 'database'}" in said
    assert f"unknown: {coordinator / 'proxy' / 'access.log'}: No such file" in said
    log = coordinator / "proxy" / "access.log"
    log.write_text(line("10.0.0.2", 1200, size=3_000_000) + line("10.0.0.3", 600) * 4)
    assert "10.0.0.3 has sent the most data in the last 20 min: 4.0 of 7.0 MB" in status(*words)[1]
    with log.open("a") as end:
        end.write(line("10.0.0.2", 3700) * 9 + line("10.0.0.2", -3700) * 9)  # another hour
        end.write(line("10.0.0.2", status=401) * 9 + line("10.0.0.2", status=503) * 9)
        end.write(line("10.0.0.2", asked="GET /health") * 9 + line("no.t.an.address") * 9)
        end.write(line("10.0.0.2", size="9" * 13) + f"x{line('10.0.0.2')}" + "\xff\n[red]\x1b[2J\n")
        end.write(line("10.0.0.2", size=9_000_000).strip())  # it is being written
    assert "10.0.0.3 has sent the most data in the last 20 min: 4.0 of 7.0 MB" in status(*words)[1]
    # Only the end of a long log is read, so the period is shorter.
    log.write_text(line("10.0.0.2", 1200) * 9 + line("10.0.0.3", 60) * 60_000)
    assert "10.0.0.3 has sent the most data in the last 1 min: 4" in status(*words)[1]
    log.write_text("")
    assert "no address has sent anything in the last hour" in status(*words)[1]


def test_the_status_over_http(run_folder, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(run_folder, directory)
    events = [
        {"event": "train", "round": 2, "client": 'a"b', "loss": 1.5, "tokens": 30, "seconds": 2.0},
        {"event": "evaluate", "round": 1, "client": "alpha", "model": "global", "loss": 2.5},
        {"event": "evaluate", "round": 2, "client": "alpha", "model": "global", "loss": 2.25},
        *(
            {"event": "lane", "round": r, "client": "alpha", "purpose": "train", "bytes_up": 10}
            for r in (1, 2)
        ),
    ]
    (directory / METRICS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    write_status(
        directory, RunStatus(phase="training", round=2, rounds=3, left_out={"beta": "late"})
    )
    with TestClient(application(directory, None), base_url="http://127.0.0.1") as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
        found = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
        expected = {
            ("chambers_active",): 0,
            ("chambers_round",): 2,
            ("chambers_clients_left_out",): 1,
            ("chambers_train_loss", 'a"b'): 1.5,
            ("chambers_evaluate_loss", "alpha", "global"): 2.25,
            ("chambers_lane_bytes_up", "alpha"): 20,
        }
        assert {key: found[key] for key in expected} == expected
        page = client.get("/")
        assert "mean held-out loss global 2.250" in page.text
        assert "mean held-out loss global 2.250" in client.get("/status").text
        assert client.get("/report").text == (directory / "report.html").read_text()
        (directory / "report.html").unlink()
        assert "written after the first evaluation" in client.get("/report").text
        assert client.get("/metrics", headers={"Host": "example.org"}).status_code == 400
        (directory / METRICS_FILE).write_text("{}\n{}\n")
        assert "line 1" in client.get("/metrics").text


def test_serve_says_where_and_ends_at_a_signal(run_folder):
    command = [sys.executable, "-m", "chambers", "status", run_folder, "--serve", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[2].rstrip(",")
        assert "chambers_rounds" in httpx.get(f"{url}/metrics").text
        process.terminate()
        assert process.wait(30) == 0


def test_a_port_that_is_taken_is_refused(run_folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--serve {port}" in refused(capsys, "status", run_folder, "--serve", str(port))
