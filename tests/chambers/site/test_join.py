"""``chambers site join``: what is refused before it waits for admission."""

import os
import shutil

import pytest

from chambers.__main__ import main
from chambers.site.authority import INSIDE, open_authority
from chambers.site.keys import open_instructions
from chambers.site.release import open_signing_key
from tests.chambers.conftest import refused
from tests.chambers.site.stand_in import proxy
from tests.conftest import write_rows


@pytest.fixture
def court(tmp_path, checkpoint):
    """Yield what joins an institution that has received all files."""
    coordinator, folder = tmp_path / "coordinator", tmp_path / "court"
    open_authority(coordinator).issue(coordinator, ["localhost", *INSIDE], 365)
    open_instructions(coordinator)
    open_signing_key(folder / "reviewer")
    for name in ("authority.pem", "instructions.pub"):
        shutil.copy(coordinator / name, folder)
    data = tmp_path / "rows" / "train.jsonl"
    write_rows(data, 8, seed=1)
    words = ["site", "join", "--name", "court", "--folder", folder, "--wait", "0"]
    words += ["--data", data.parent, "--model", checkpoint, "--coordinator"]
    environment = dict(os.environ)
    yield coordinator, folder, [str(word) for word in words]
    os.environ.clear()  # the command takes over the host's environment
    os.environ.update(environment)


def test_what_is_missing_is_named_before_anything_is_written(court, capsys):
    _, folder, words = court
    shutil.rmtree(folder)
    refusal = refused(capsys, *words, "localhost:8443")
    assert "lacks authority.pem, instructions.pub, trusted.yaml: the reviewer sends" in refusal
    assert "there is no such file" in refused(capsys, *words, "localhost:8443", "--data", "/none")
    assert not (folder / "node").exists()


def test_it_waits_for_admission_only_if_everything_is_right(court, capsys):
    coordinator, folder, words = court
    with proxy(coordinator) as port:
        words.append(f"localhost:{port}")
        (folder / "policy.toml").write_text("rounds = ")
        assert main(words) == 1
        said = capsys.readouterr().out
        assert "resolve the lines that begin with fix" in said and "waiting" not in said
        (folder / "policy.toml").unlink()
        # The stand-in can't say which keys are registered.
        assert main(words) == 2
        assert "waiting for admission" in capsys.readouterr().out
