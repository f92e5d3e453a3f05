"""Files of the cache are written once, however many processes need them."""

import subprocess
import sys
from pathlib import Path

import pytest

WRITES = """
import sys, time
from pathlib import Path
from finetuning.files import cached

def write(aside):
    aside.mkdir()
    time.sleep(1)
    (aside / "file").write_text("whole")
    print("written")

folder = cached(Path(sys.argv[1]) / "folder", write)
assert (folder / "file").read_text() == "whole"
"""


@pytest.mark.slow
def test_processes_that_need_a_folder_at_once_write_it_once(tmp_path):
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    root = Path(__file__).parents[2]
    processes = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(outputs) == [b"", b"", b"written\n"]
