"""Features that are refused or omitted if an optional library isn't installed."""

import sys

import pytest

from federation.run_config import RunConfig
from federation.site_policy import PolicyError, read_policy
from server_app.results import Results
from tests.chambers.conftest import refused

POLICY = "[privacy]\nepsilon = 1.0\ndelta = 1e-5\n"


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides an installed library."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_a_policy_with_privacy_is_refused_without_opacus(without, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    assert read_policy(str(file)).privacy.epsilon == 1.0
    without("opacus")
    with pytest.raises(PolicyError, match=r"pip install 'chambers\[privacy\]'"):
        read_policy(str(file))
    file.write_text("")
    assert read_policy(str(file)).privacy.epsilon is None


def test_the_table_of_an_evaluation_names_what_it_needs(without, capsys, tmp_path):
    files = [tmp_path / "key.json", tmp_path / "annotator-1.csv"]
    without("nltk")
    message = refused(capsys, "sheet", "read", *files)
    assert "needs nltk: pip install 'chambers[sheet]'" in message


def test_a_run_needs_no_tensorboard(without, tmp_path):
    def write(folder):
        folder.mkdir()
        results = Results(folder, RunConfig(), folder, peft_config=None)
        results.record({"event": "train", "round": 1, "client": "court", "loss": 2.0})
        results.close()
        return (folder / "tensorboard").exists()

    assert write(tmp_path / "with")
    without("tensorboard")
    assert not write(tmp_path / "without")
