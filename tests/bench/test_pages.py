"""The experiments' tables and pictures in the documentation are those of the recorded results."""

import json
import shutil
from pathlib import Path

import pytest

from chambers.__main__ import main
from tests.bench.pictures_equal import assert_same_picture

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = sorted(file.parent for file in (DOCS / "recorded").rglob("results.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("recorded", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_s_tables_are_those_of_its_results(recorded, tmp_path):
    results = Path(shutil.copy(recorded / "results.jsonl", tmp_path))
    size = json.loads(results.read_text().partition("\n")[0])["size"]
    file = DOCS.parent / "experiments" / f"{recorded.name}.toml"
    words = [str(file), "--size", size, "--render", "--output", str(tmp_path)]
    assert main(["experiment", *words]) == 0
    page = (DOCS / "results.md").read_text()
    for table in tmp_path.glob("*.md"):
        assert table.read_text() in page
    for picture in tmp_path.glob("*.svg"):
        assert_same_picture(picture.read_text(), (recorded / picture.name).read_text())
