"""A deployment that the tests of this folder share."""

import os
import shutil
from pathlib import Path

import pytest

from bench.deployment.deployment import Deployment, deployment
from tests.conftest import write_checkpoint, write_rows


@pytest.fixture(scope="session")
def nginx():
    """Skip tests that need nginx where it is missing; in CI they always run."""
    if shutil.which("nginx") is None:
        reason = "nginx is not installed; on Debian: apt-get install nginx-light"
        if "CHAMBERS_CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def running(nginx, tmp_path_factory):
    """Start a coordinator and two institutions, court and consultation."""
    folder = tmp_path_factory.mktemp("hosts")
    data = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"court": 16, "consultation": 8}.items()):
        write_rows(data / name / "train.jsonl", count, seed)
        write_rows(data / name / "test.jsonl", 4, 100 + seed)
    model = write_checkpoint(tmp_path_factory.mktemp("model"), blocks=4)
    folders = {name: data / name for name in ("court", "consultation")}
    with deployment(folder, folders, model) as running:
        yield running


def results(running: Deployment) -> Path:
    """Return the folder with the results of the newest run."""
    runs = running.hosts["coordinator"].folder / "state" / ".local" / "share" / "chambers" / "runs"
    return max(runs.iterdir(), key=lambda folder: folder.stat().st_mtime)
