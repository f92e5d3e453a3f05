"""Programs that train or serve use tcmalloc where it is installed."""

import os
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest

PROGRAM = """
from chambers.allocator import restart_with_allocator
restart_with_allocator()
import sys
print(sys.argv[1:], "tcmalloc" in open("/proc/self/maps").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the folder /proc")
def test_a_program_is_started_again_with_its_arguments():
    installed = find_library("tcmalloc_minimal") is not None
    for variables, preloads in (({}, installed), ({"LD_PRELOAD": "libc.so.6"}, False)):
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | variables
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--a b", "c"],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout == f"['--a b', 'c'] {preloads}\n"
