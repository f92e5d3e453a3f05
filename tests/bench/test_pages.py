"""The documentation contains exactly what the measurements have printed."""

import re
import shutil

import pytest

from bench.pages import DOCS, filled
from chambers.__main__ import main
from tests.bench.pictures_equal import assert_same_picture

RECORDED = DOCS / "recorded"
RECORDS = [file.relative_to(DOCS).as_posix() for file in sorted(RECORDED.rglob("*.md"))]
EXPERIMENTS = sorted(file.parent for file in RECORDED.rglob("results.jsonl"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_shows_what_is_recorded(page):
    text = page.read_text()
    assert filled(text) == text


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_shown_once(record):
    shown = re.findall(f"<!-- {record} -->", "".join(p.read_text() for p in DOCS.glob("*.md")))
    assert len(shown) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recorded", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_s_tables_are_those_of_its_results(recorded, tmp_path):
    shutil.copy(recorded / "results.jsonl", tmp_path)
    file = DOCS.parent / "experiments" / f"{recorded.name}.toml"
    assert main(["experiment", str(file), "--render", "--output", str(tmp_path)]) == 0
    for written in tmp_path.iterdir():
        before = recorded / written.name
        if written.suffix == ".svg":
            assert_same_picture(written.read_text(), before.read_text())
        else:
            assert written.read_text() == before.read_text()
