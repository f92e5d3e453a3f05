"""The formal model of the lane proves the statements in docs/formal.md."""

import runpy
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

pytestmark = pytest.mark.skipif(not shutil.which("eprover"), reason="eprover is not installed")


@pytest.fixture(scope="module")
def check():
    return runpy.run_path(str(DOCS / "formal" / "check.py"))


@pytest.mark.parametrize("query", ["opens", "resumes"])
def test_lanes_can_be_opened_and_resumed_in_the_model(check, query):
    assert not check["holds"]((), "before", query)


def test_all_three_secrets_of_a_recorded_stream_decrypt_it(check):
    assert not check["holds"](("ticket", "server-key", "client-share"), "after", "past")


@pytest.mark.slow
def test_the_page_has_the_prover_s_table(check):
    assert check["table"]() in (DOCS / "formal.md").read_text()
