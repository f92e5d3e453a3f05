"""Long turns on a core that many processes share."""

import ctypes
import os
import platform
from ctypes import Structure, c_int32, c_uint32, c_uint64, sizeof

_SYSTEM_CALL = {"x86_64": 314, "aarch64": 274}  # sched_setattr, which Python has no function for
_NANOSECONDS = 100_000_000  # the longest slice that Linux gives


class _Attributes(Structure):
    _fields_ = (
        ("size", c_uint32),
        ("policy", c_uint32),
        ("flags", c_uint64),
        ("nice", c_int32),
        ("priority", c_uint32),
        ("runtime", c_uint64),
        ("deadline", c_uint64),
        ("period", c_uint64),
    )


def take_long_slices() -> None:
    """Let this process, and those that it starts, compute for 100 ms before others take their turn.

    Linux changes between processes that share a core every few milliseconds, and each then fetches
    again what the others have displaced from the core's cache. They become batch work
    (``SCHED_BATCH``, see sched(7)), which doesn't interrupt others when it wakes up.

    Raises:
        SystemExit: the system is not Linux on x86-64 or ARM64, or refuses.

    """
    call = _SYSTEM_CALL.get(platform.machine()) if platform.system() == "Linux" else None
    if call is None:
        raise SystemExit("bench.schedules needs Linux, on x86-64 or ARM64")
    size = sizeof(_Attributes)
    attributes = _Attributes(size=size, policy=os.SCHED_BATCH, runtime=_NANOSECONDS)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(call, 0, ctypes.byref(attributes), 0) != 0:
        raise SystemExit(f"sched_setattr failed: {os.strerror(ctypes.get_errno())}")
