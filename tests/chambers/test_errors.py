"""Commands end with the reason if files can't be read or written, or settings are missing."""

import pytest

import chambers.site.setup  # noqa: F401 - another user may be unable to read the libraries
from tests.chambers.conftest import another_user, refused
from tests.conftest import fill


@pytest.mark.parametrize(
    "words",
    [
        ("status", "closed/run"),
        ("serve", "closed/run"),
        ("train", "data.path=closed/rows.jsonl"),
        ("site", "coordinator", "localhost", "--folder", "closed"),
    ],
)
def test_a_folder_of_another_user(capsys, tmp_path, words):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with another_user():
        reason = refused(capsys, *(word.replace("closed", str(closed)) for word in words))
    assert str(closed) in reason and "Permission denied" in reason


def test_a_full_disk(capsys, small_disk):
    fill(small_disk)
    reason = refused(capsys, "site", "coordinator", "localhost", "--folder", str(small_disk))
    assert reason == f"no space is left on the disk of {small_disk}: free some space\n"


def test_a_deployment_is_not_run_with_defaults_alone(capsys, tmp_path):
    assert "no settings are named" in refused(capsys, "run", tmp_path)
