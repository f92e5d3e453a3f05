"""Any text from a peer can be logged, stored and displayed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetuning.errors import printable

ANYTHING = st.text(st.characters(exclude_categories=()))  # lone surrogates included


@given(ANYTHING, st.integers(1, 50))
def test_any_text_becomes_one_bounded_line_that_can_be_encoded(text, most):
    shown = printable(text, most)
    assert shown.isprintable() and len(shown) <= most
    assert json.loads(json.dumps(shown, ensure_ascii=False).encode()) == shown
    assert printable(shown, most) == shown


@given(ANYTHING.filter(str.isprintable))
def test_printable_text_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer 法院 суд", "größer 法院 суд"),
        ("line\nfeed\r\x00", r"line\nfeed\r\x00"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\u202eleft\u2066", r"\u202eleft\u2066"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("x" * 2000, "x" * 999 + "…"),
    ],
)
def test_examples(text, shown):
    assert printable(text) == shown
