"""The notebook in ``examples/``, run from its first cell to its last as a user runs it."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.name)
def test_notebooks_are_committed_without_outputs(file):
    notebook = nbformat.read(file, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, f"clear the outputs of {cell.id}"
            assert cell.execution_count is None, f"clear the outputs of {cell.id}"


def executed(name: str, folder: Path) -> dict:
    """Run a notebook in a folder, with the tiny model and smaller sizes; return cells by id."""
    notebook = nbformat.read(EXAMPLES / name, as_version=nbformat.NO_CONVERT)
    (settings,) = (cell for cell in notebook.cells if 'name = "smollm2"' in cell.source)
    for line, less in (
        ("smollm2", "tiny"),
        ("rounds = 3", "rounds = 2"),
        ("examples = 4", "examples = 1"),
    ):
        assert line in settings.source
        settings.source = settings.source.replace(line, less)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, kernel_name="python3", timeout=600, resources=place).execute()
    return {cell.id: cell for cell in notebook.cells}


def answer(cell, model: str) -> str:
    """Return the text that follows a model's name in a cell's output."""
    printed = "".join(out.text for out in cell.outputs if out.output_type == "stream")
    return printed.partition(f"{model}: ")[2].partition("\n")[0]


def evaluations(run: Path) -> dict:
    """Return the ``evaluate`` events, keyed by client, model and round."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(e["client"], e["model"], e["round"]): e for e in events if e["event"] == "evaluate"}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_trains_serves_and_draws(left_over, tmp_path, monkeypatch):
    home, folder = tmp_path / "home", tmp_path / "folder"
    home.mkdir()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    cells = executed("three_institutions.ipynb", folder)
    assert {path.name for path in folder.iterdir()} == {"runs"}
    assert not [*home.rglob("*chambers*")]
    assert not left_over()

    (with_penalty,), (without,) = (
        (folder / "runs" / method).iterdir() for method in ("cl", "base")
    )
    cl, base = evaluations(with_penalty), evaluations(without)
    for client in ("school-1", "school-2", "school-3"):
        assert cl[client, "personalised", 2]["loss"] < cl[client, "base", 0]["loss"]
        # In round 1, there is no penalty yet, so the methods are equal, as in the paper's figure.
        assert cl[client, "personalised", 1] == base[client, "personalised", 1]
        assert cl[client, "personalised", 2] != base[client, "personalised", 2]
    personalised = answer(cells["load"], "personalised")
    assert personalised
    assert personalised == answer(cells["served"], "served")
    assert personalised != answer(cells["load"], "base")
    shown = {kind for output in cells["draw"].outputs for kind in output.get("data", {})}
    assert "image/png" in shown
