"""What the ServerApp refuses before a run leaves nothing half-written."""

import pytest
from flwr.app import Context, RecordDict

from bench.in_process import InProcessGrid
from finetuning.model.base_model import BaseModelError
from server_app.main import main
from strategies.run_config import ConfigError


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"model.name": "/nowhere"}, BaseModelError, "no config.json in /nowhere"),
        ({"output-dir": "/proc/nowhere"}, ConfigError, "can't be written to"),
    ],
)
def test_nothing_is_left_of_a_refused_run(values, tmp_path, change, error, reason):
    values |= {"output-dir": str(tmp_path / "runs")} | change
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    with pytest.raises(error, match=reason):
        main(InProcessGrid(values, {}), context)
    assert not list((tmp_path / "runs").glob("*"))
