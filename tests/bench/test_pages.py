"""The experiments' tables and pictures in the documentation are those of the recorded results."""

import json
import re
import shutil
from pathlib import Path

import pytest

from chambers.__main__ import main
from tests.bench.markdown_tables import assert_selected, tables_in
from tests.bench.pictures_equal import assert_same_picture

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = (DOCS / "results.md").read_text().split("\n## ")


def title_of(section):
    return section.partition("\n")[0]


def experiments_of(section):
    return re.findall(r"experiments/([\w-]+)\.toml", section)


def render(experiment, folder):
    recorded = DOCS / "recorded" / experiment
    results = Path(shutil.copy(recorded / "results.jsonl", folder))
    size = json.loads(results.read_text().partition("\n")[0])["size"]
    file = DOCS.parent / "experiments" / f"{experiment}.toml"
    words = [str(file), "--size", size, "--render", "--output", str(folder)]
    assert main(["experiment", *words]) == 0
    for picture in folder.glob("*.svg"):
        assert_same_picture(picture.read_text(), (recorded / picture.name).read_text())
    return [table for file in folder.glob("*.md") for table in tables_in(file.read_text())]


def test_sections_with_tables_name_the_recorded_experiments():
    recorded = {file.parent.name for file in (DOCS / "recorded").rglob("results.jsonl")}
    assert {name for section in SECTIONS for name in experiments_of(section)} == recorded
    for section in SECTIONS:
        assert bool(tables_in(section)) == bool(experiments_of(section)), section


@pytest.mark.slow
@pytest.mark.parametrize("section", filter(experiments_of, SECTIONS), ids=title_of)
def test_a_section_has_the_tables_of_its_experiments(section, tmp_path):
    made = []
    for experiment in experiments_of(section):
        folder = tmp_path / experiment
        folder.mkdir()
        made += render(experiment, folder)
    for table in tables_in(section):
        assert_selected(table, made)
