"""Refusals of the ServerApp before a run begins leave no incomplete folder."""

import pytest

from federation.run_config import ConfigError
from finetuning.adapters.saved import AdapterError
from finetuning.errors import BaseModelError
from tests.server_app.runs import serve


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"model.name": "/nowhere"}, BaseModelError, "no config.json in /nowhere"),
        ({"initial-adapter": "/nowhere"}, AdapterError, "/nowhere"),
    ],
)
def test_nothing_is_left_of_a_refused_run(values, tmp_path, change, error, reason):
    """The run's folder was created before these settings were checked."""
    with pytest.raises(error, match=reason):
        serve(values | {"output-dir": str(tmp_path / "runs")} | change)
    assert (tmp_path / "runs").is_dir()
    assert not list((tmp_path / "runs").iterdir())


def test_an_unwritable_output_dir_is_refused(values):
    with pytest.raises(ConfigError, match=r'output-dir = "/proc/nowhere" can\'t be written to'):
        serve(values | {"output-dir": "/proc/nowhere"})
