"""The memory allocator of processes that train or serve: tcmalloc, where it is installed.

glibc's allocator can't reuse all freed memory, because small blocks lie between large ones. With
tcmalloc, a client needs a third less (docs/measurements.md).
"""

import os
import sys
from ctypes.util import find_library


def allocator_variables() -> dict[str, str]:
    """Return environment variables with which new processes use tcmalloc.

    There are none if it isn't installed, or if ``LD_PRELOAD`` is set.
    """
    library = find_library("tcmalloc_minimal") if sys.platform == "linux" else None
    return {"LD_PRELOAD": library} if library and "LD_PRELOAD" not in os.environ else {}


def restart_with_allocator() -> None:
    """Start this program again with tcmalloc, unless it isn't installed or is already used."""
    if variables := allocator_variables():
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(command[0], command, os.environ | variables)
