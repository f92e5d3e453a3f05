"""Simulation on a Ray cluster of two hosts: two addresses of this machine's loopback interface."""

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from chambers.superlink import free_port
from tests.in_process import run_in_process
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly
PROGRAMS = Path(sys.executable).parent
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
HIDING = 'mount -t tmpfs none "$0" && exec "$@"'


def kill(process):
    own = psutil.Process(process.pid).children(recursive=True)
    for each in [*own, process]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@contextmanager
def host(output, *arguments, hidden):
    """Start a host of a cluster that has an empty disk at ``hidden``; yield its process."""
    command = ["unshare", "--mount", "sh", "-c", HIDING, hidden, PROGRAMS / "ray", "start"]
    command += ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    with (
        output.open("wb") as log,
        subprocess.Popen([*command, "--block", *arguments], stdout=log, stderr=log) as process,
    ):
        try:
            wait_until(lambda: b"Ray runtime started" in output.read_bytes(), 240)
            yield process
        finally:
            if process.poll() is None:
                kill(process)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Yield the address of a cluster's head, its other host, and a folder that they don't share."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can give a host an empty disk")
    folder, port = tmp_path_factory.mktemp("cluster"), free_port()
    hidden, unused = folder / "hidden", folder / "unused"
    hidden.mkdir()
    unused.mkdir()
    # Paths of sockets are too long below ``folder``.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        head = ["--head", f"--port={port}", f"--node-ip-address={HEAD}", f"--temp-dir={short}"]
        other = [f"--address={HEAD}:{port}", f"--node-ip-address={OTHER}"]
        with (
            host(folder / "head", *head, "--include-dashboard=false", hidden=unused),
            host(folder / "other", *other, hidden=hidden) as process,
        ):
            yield f"{HEAD}:{port}", process, hidden


def train(address, values, folder, **changed):
    """Start a run on a cluster."""
    paths = {"state-path": str(folder / "state"), "output-dir": str(folder / "runs")}
    pairs = [f"{key}={json.dumps(value)}" for key, value in {**values, **paths, **changed}.items()]
    command = [PROGRAMS / "chambers", "train", *pairs, "--ray", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_results_equal_those_of_one_machine(cluster, values, tmp_path):
    values |= {"rounds": 1, "train.local-steps": 2}
    shown = train(cluster[0], values, tmp_path).communicate()[0]
    (run,) = (tmp_path / "runs").iterdir()
    log = (run / "log.txt").read_text()
    assert "run completed" in shown and "ip=127.0.0." in log, shown + log
    ours = load_file(run / "adapters" / "global" / "adapter_model.safetensors")
    theirs = run_in_process(values, tmp_path / "alone", 3).adapters[1]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_host_that_does_not_share_the_state_is_named(cluster, values, tmp_path):
    address, _, hidden = cluster
    shown = train(address, values, tmp_path, **{"state-path": str(hidden)}).communicate()[0]
    assert f"state-path ({hidden}) is " in shown and f"shared on host {OTHER}, but " in shown


def test_a_dead_host_ends_the_run_and_its_clients_are_named(cluster, values, tmp_path):
    address, other, _ = cluster
    changed = {"rounds": 2, "train.local-steps": 2000, "train.learning-rate": 1e-6}
    with train(address, values, tmp_path, **changed) as process:
        try:
            logs = tmp_path / "runs"
            wait_until(lambda: any("ROUND" in f.read_text() for f in logs.glob("*/log.txt")), 400)
            kill(other)
            shown = process.communicate(timeout=400)[0]
        finally:
            process.kill()
    assert process.returncode == 1 and "round 1: " in shown and "left out:" in shown
    lost = ": the simulation's process that ran it was killed, or its host failed"
    assert any(f"{name}{lost}" in shown for name in ("alpha", "beta", "gamma"))
