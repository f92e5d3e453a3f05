"""The formal model of the lane proves the statements in README.md."""

import shutil
from pathlib import Path

import pytest

from tests.formal.check import holds, table

PAGE = Path(__file__).with_name("README.md")

pytestmark = pytest.mark.skipif(not shutil.which("eprover"), reason="eprover is not installed")


@pytest.mark.parametrize("query", ["opens", "resumes"])
def test_lanes_can_be_opened_and_resumed_in_the_model(query):
    assert not holds((), "before", query)


def test_all_three_secrets_of_a_recorded_stream_decrypt_it():
    assert not holds(("ticket", "server-key", "client-share"), "after", "past")


@pytest.mark.slow
def test_the_page_has_the_table_of_the_prover():
    assert table() in PAGE.read_text()
