"""``chambers site up``: programs run together, and none outlives the command."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest

from tests.chambers.conftest import ROOT, refused
from tests.waiting import wait_until

UNIT = """
[Service]
EnvironmentFile={folder}/institution.env
Environment=PLACE=there
ExecStart=/bin/sh \\
    -c '{commands}'
"""


@pytest.fixture
def folder(tmp_path):
    """Write a host's folder with two programs, one of which has a child."""
    for name in ("state", "systemd"):
        (tmp_path / name).mkdir()
    (tmp_path / "institution.env").write_text("# a comment\nINSTITUTION=court\n")
    unit(tmp_path, "first", 'echo "${INSTITUTION} is ${PLACE}"; sleep 1000 & wait')
    unit(tmp_path, "second", 'until test -e "$HOME/end"; do sleep 0.1; done')
    (tmp_path / "flower.env").write_text(f"HOME={tmp_path}/state\n")
    return tmp_path


def unit(folder, name, commands):
    text = UNIT.format(folder=folder, commands=commands)
    (folder / "systemd" / f"chambers-{name}.service").write_text(text)


@contextmanager
def up(folder):
    """Run the command, and yield its process once the first program has written a line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chambers", "site", "up", str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "first     | court is there\n"
        yield process
    finally:
        process.kill()
        process.wait(20)


def started(process):
    """Return the programs of the command and their processes."""
    own = psutil.Process(process.pid)
    wait_until(lambda: any("1000" in each.cmdline() for each in own.children(recursive=True)))
    return own.children(recursive=True)


def running(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP])
def test_all_programs_end_with_the_command(folder, ending):
    with up(folder) as process:
        programs = started(process)
        process.send_signal(ending)
        assert process.wait(60) == 0, process.stderr.read()
        assert not running(programs)
    assert (folder / "state" / "logs" / "first.log").read_text() == "court is there\n"


def test_all_programs_end_if_one_of_them_ends(folder):
    (folder / "state" / "logs").mkdir()
    (folder / "state" / "logs" / "first.log").symlink_to("/dev/full")  # its output is still read
    with up(folder) as process:
        programs = started(process)
        (folder / "state" / "end").touch()
        assert process.wait(60) == 1
        assert "second has ended; see" in process.stderr.read()
        assert not running(programs)


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux ends the children of a killed process")
def test_programs_end_if_the_command_is_killed(folder):
    with up(folder) as process:
        command = psutil.Process(process.pid)
        # Before, setpriv is running, which asks the kernel to end the program with the command.
        wait_until(lambda: [p.cmdline()[:1] for p in command.children()] == [["/bin/sh"]] * 2, 60)
        programs = command.children()
        process.kill()
        wait_until(lambda: not running(programs), 60)


def test_refusals(capsys, folder, monkeypatch):
    for name in ("HOME", "PATH", "FLWR_HOME"):  # the command changes these variables
        monkeypatch.setenv(name, os.environ.get(name, ""))
    first = folder / "systemd" / "chambers-first.service"
    first.write_text(first.read_text().replace("/bin/sh", "/bin/none"))
    assert f"/bin/none, which {first} starts, is not" in refused(capsys, "site", "up", folder)
    for file in (folder / "systemd").iterdir():
        file.unlink()
    assert "has no units" in refused(capsys, "site", "up", folder)
    (folder / "state").rmdir()
    assert "is not a host's folder" in refused(capsys, "site", "up", folder)
