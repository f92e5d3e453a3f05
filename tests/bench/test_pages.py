"""The documentation shows what measurements have printed."""

import re

import pytest

from bench.pages import DOCS, filled

RECORDS = sorted((DOCS / "recorded").glob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_a_page_shows_what_is_recorded(page):
    text = page.read_text()
    assert filled(text) == text


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_is_shown_once(record):
    shown = re.findall(
        rf"<!-- recorded/{record.name} -->", "".join(p.read_text() for p in DOCS.glob("*.md"))
    )
    assert len(shown) == 1
