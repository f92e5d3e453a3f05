"""The formal models of the lane and of masked sums prove the statements in README.md."""

import shutil
from pathlib import Path

import pytest

from tests.formal.check import SUM_QUERIES, SUM_SECRETS, SUMS, holds, table

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


def test_a_group_can_be_summed_in_the_model():
    assert not holds((), "before", "sum", SUMS)


def test_the_page_has_the_table_of_masked_sums():
    assert table(SUM_SECRETS, SUM_QUERIES, SUMS) in PAGE.read_text()


def test_a_digest_without_the_adapter_would_mix_sums(tmp_path):
    model = tmp_path / "weak.horn"
    model.write_text(SUMS.read_text().replace("framed(S, M, A, B, C)", "framed(S, none, A, B, C)"))
    assert not holds((), "before", "mixed", model)
