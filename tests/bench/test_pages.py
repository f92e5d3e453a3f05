"""The documentation shows what measurements have printed, and no figures of other origin."""

import re

import pytest

from bench.pages import DOCS, filled

# A number with a unit, or a ratio.
RESULT = re.compile(
    r"\b\d[\d.,]*\s?(?:%|×|(?:seconds?|minutes?|hours?|ms|s|[KMGT]i?B|tokens/s|points)\b)"
    r"|factor of \d[\d.]*|\b\d[\d.]* times"
)
NOT_MEASURED = {
    "50 %",  # of the shares that λ is found for
    "1 MiB",  # the threshold of mapping
    "factor of 1.19",  # operations, counted
    "256 MiB",  # a limit
}
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


@pytest.mark.parametrize("page", ["README.md", "docs/measurements.md", "docs/privacy.md"])
def test_results_come_from_records(page):
    """Neither tables nor sentences have results of their own; settings and limits may be named."""
    text = (DOCS.parent / page).read_text()
    typed = re.sub(r"<!-- (recorded/|from here).*?<!-- until here -->", "", text, flags=re.DOTALL)
    typed = re.sub(r"```.*?```|`[^`]*`", "", typed, flags=re.DOTALL)
    if page == "docs/measurements.md":
        assert not re.search(r"^\|.*\d", typed, flags=re.MULTILINE)
    assert set(RESULT.findall(typed)) <= NOT_MEASURED
