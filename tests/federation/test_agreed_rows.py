"""The file with the agreed numbers of rows is read in deployments, and only there."""

import platformdirs
import pytest
from flwr.superlink.grid import HttpGrid

from chambers.in_process import InProcessGrid
from federation.agreed_rows import agree_on_rows, agreed_rows_of
from federation.run_config import ConfigError


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return platformdirs.user_data_path("chambers") / "agreed-rows.json"


def test_agreements_are_read_as_they_were_written(file):
    grid = HttpGrid(token="token")
    assert agreed_rows_of(grid) == {}
    for name, rows in {"court": 1200, "clinic": 5, "school": None}.items():
        agree_on_rows(name, rows)
    agree_on_rows("court", 1300)
    agree_on_rows("clinic", None)
    assert agreed_rows_of(grid) == {"court": 1300}
    assert agreed_rows_of(InProcessGrid({}, {})) is None


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"court": 0}', '{"court": "12"}', '{"court": 1.5}']
)
def test_a_malformed_file_ends_a_deployed_run(file, content):
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"{file} can't be read: .*chambers site admit"):
        agreed_rows_of(HttpGrid(token="token"))
    assert agreed_rows_of(InProcessGrid({}, {})) is None
