"""The run config is the only source of defaults and tables, and reports all errors at once."""

import tomllib
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict
from hypothesis import given
from hypothesis import strategies as st

from federation.run_config import ConfigError, RunConfig, parse_run_config
from tests.setting_tables import run_config_table

ROOT = Path(__file__).parent.parent
KEYS = sorted(RunConfig().flat())


def test_pyproject_has_every_key_with_its_default():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert flatten_dict(pyproject["tool"]["flwr"]["app"]["config"]) == RunConfig().flat()


def test_documentation_is_current():
    assert run_config_table() in (ROOT / "docs" / "configuration.md").read_text()


def test_flat_and_parse_are_inverse():
    changed = RunConfig().flat() | {"continual.lambda": 0.25, "train.batch-size": 3, "resume": "/x"}
    assert parse_run_config(changed).flat() == changed


def test_all_mistakes_are_listed_with_what_is_allowed():
    wrong = {
        "strategi": "fedjudge-cl",
        "rounds": -1,
        "train.batch-size": "two",
        "model.dtype": "half",
        "output-dir": "results",
        "train.learning-rate": float("inf"),
    }
    with pytest.raises(ConfigError) as caught:
        parse_run_config(wrong)
    text = str(caught.value)
    for expected in (
        "strategi = 'fedjudge-cl': unknown key; did you mean strategy?",
        "rounds = -1",
        "train.batch-size = 'two'",
        "whole number, > 0",
        "model.dtype = 'half'",
        "`auto`, `float32`, `bfloat16`",
        "output-dir = 'results': must be an absolute path",
        "train.learning-rate = inf",
    ):
        assert expected in text


@given(
    st.dictionaries(
        st.one_of(st.sampled_from(KEYS), st.text(max_size=20)),
        st.one_of(st.text(max_size=8), st.integers(), st.floats(), st.booleans()),
        max_size=5,
    )
)
def test_any_flat_config_is_either_valid_or_refused_in_words(values):
    try:
        config = parse_run_config(values)
    except ConfigError as error:
        assert "the run config is invalid" in str(error)
    else:
        assert set(values) <= set(config.flat())
