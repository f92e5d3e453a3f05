"""Files that can't be read or written end a command with the file and the reason."""

import pytest

import chambers.site.instructions  # noqa: F401 - another user may be unable to read the libraries
from tests.chambers.conftest import another_user, refused
from tests.conftest import fill


@pytest.mark.parametrize(
    "words",
    [
        ("status", "closed/run"),
        ("serve", "closed/run"),
        ("train", "data.path=closed/rows.jsonl"),
        ("site", "key", "closed/node"),
        ("site", "certificates", "closed"),
    ],
)
def test_a_folder_of_another_user(capsys, tmp_path, words):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with another_user():
        reason = refused(capsys, *(word.replace("closed", str(closed)) for word in words))
    assert str(closed) in reason and "Permission denied" in reason


@pytest.mark.parametrize(
    "words", [("key", "disk/node"), ("certificates", "disk", "--name", "localhost")]
)
def test_a_full_disk(capsys, small_disk, words):
    fill(small_disk)
    words = (word.replace("disk", str(small_disk)) for word in words)
    reason = refused(capsys, "site", *words)
    assert reason == f"no space is left on the disk of {small_disk}: free some space\n"
