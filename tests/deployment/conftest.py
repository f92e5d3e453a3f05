"""A deployment that the tests in this folder share."""

from pathlib import Path

import pytest

from tests.conftest import write_checkpoint, write_rows
from tests.deployment.deployment import CHECKOUT, Deployment, deployment

PAGE = (CHECKOUT / "docs" / "deployment.md").read_text()


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


def contains(said: str, text: str) -> None:
    """Check that ``said``, whose lines may be wrapped in a frame, contains a text."""
    assert text in " ".join(said.replace("│", " ").split()), said


def explained(said: str, text: str) -> None:
    """Check that ``said`` contains a text, and that docs/deployment.md has a section about it."""
    contains(said, text)
    assert f"### `{text}`" in PAGE
