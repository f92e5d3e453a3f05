"""Build and install the fake accelerator of ``device.cpp``: devices ``cuda:0`` and ``cuda:1``.

Install it before importing anything but torch and bitsandbytes: on import, libraries check whether
there is a GPU.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from finetuning.files import cache_directory

SOURCE = Path(__file__).with_name("device.cpp")
_ROOT = f"{Path(__file__).parents[2]}/"


class NotBuiltError(Exception):
    """The fake accelerator can't be built here."""


def build() -> Path:
    """Compile the library, or find it in the cache for this source and version of torch.

    Raises:
        NotBuiltError: There is no compiler, it fails, or torch already has kernels for CUDA.

    """
    if torch.version.cuda or torch.version.hip:
        raise NotBuiltError("the fake accelerator needs a build of torch without CUDA")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_directory() / "fake-accelerator" / f"{torch.__version__}-{digest}.so"
    if library.exists():
        return library
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NotBuiltError("the fake accelerator needs g++; on Debian: apt-get install g++")
    from torch.utils.cpp_extension import include_paths, library_paths

    library.parent.mkdir(parents=True, exist_ok=True)
    aside = library.with_suffix(f".{os.getpid()}")
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w"]
    folders = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    libraries = ["-lc10", "-ltorch_cpu"]
    command = [compiler, *options, *folders, str(SOURCE), *libraries, "-o", str(aside)]
    if subprocess.run(command, check=False).returncode:
        raise NotBuiltError("the fake accelerator can't be compiled; see the compiler's messages")
    aside.rename(library)
    return library


class GPUs:
    """The GPUs of this machine, for tests that don't require the fake accelerator."""

    tolerance = 1e-3  # their kernels add in a different order from the CPU's
    draws_as_cpu = False

    def __init__(self) -> None:
        self.devices = torch.cuda.device_count()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Hide all accelerators within the context."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
            patch.setattr(torch.accelerator, "is_available", lambda: False)
            patch.setattr(torch.cuda, "is_available", lambda: False)
            yield

    def peak(self, index: int) -> int:
        """Return the most bytes of a device that were in use since the last call."""
        found = torch.cuda.max_memory_allocated(index)
        torch.cuda.reset_peak_memory_stats(index)
        return found


class FakeAccelerator:
    """The installed devices, which report their memory, and where the host waits for them."""

    tolerance = 1e-5
    draws_as_cpu = True  # a seed gives the same random numbers as on the CPU

    def __init__(self, library: Path, devices: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._own: Any = torch.ops.fake_device
        self.devices = devices
        self.has_bfloat16 = True  # whether it is supported natively
        self._own.install()
        self._own.set_device_count(devices)

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Hide the devices within the context, as in a process without a GPU."""
        self._own.set_device_count(0)
        try:
            yield
        finally:
            self._own.set_device_count(self.devices)

    @contextmanager
    def room(self, index: int, free: int) -> Iterator[None]:
        """Leave only ``free`` bytes of a device's memory free within the context."""
        before = self._own.limit(index)
        self._own.set_limit(index, self._own.used(index) + free)
        try:
            yield
        finally:
            self._own.set_limit(index, before)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Make operators raise AcceleratorError within the context, as after a failed kernel."""
        self._own.set_broken(True)
        try:
            yield
        finally:
            self._own.set_broken(False)

    def used(self, index: int) -> int:
        """Return the bytes of a device that are in use."""
        return int(self._own.used(index))

    def peak(self, index: int) -> int:
        """Return the most bytes of a device that were in use since the last call."""
        found = int(self._own.peak(index))
        self._own.reset_peak(index)
        return found

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Yield a list of the host's waits within the context: each one's line and reason."""
        found: list[str] = []
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)

        @kind
        def note(reason: bytes) -> None:
            found.append(f"{_line()}: {reason.decode()}")

        self._library.fake_device_on_wait(note)
        try:
            yield found
        finally:
            self._library.fake_device_on_wait(kind())


def _line() -> str:
    """Return the innermost line of this project on the stack, else the innermost of a library."""
    lines = []
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    own = (line for line in lines if line.startswith(_ROOT) and "site-packages" not in line)
    found = next(own, lines[0] if lines else "a thread of autograd")
    return found.removeprefix(_ROOT)


@cache
def install(devices: int = 2) -> FakeAccelerator:
    """Build the library if necessary, and make this process see its devices.

    Raises:
        NotBuiltError: The library can't be built here.

    """
    library = build()
    # bitsandbytes chooses its kernels on import; without a GPU, it chooses those for the CPU.
    import bitsandbytes  # noqa: F401

    late = {"transformers", "accelerate", "peft"} & set(sys.modules)
    assert not late, f"{late} were imported before the fake accelerator was installed"
    device = FakeAccelerator(library, devices)
    for name, function in _functions(device).items():
        setattr(torch.cuda, name, function)
    # The functions for all devices in ``torch.cuda.random`` call these functions of that module.
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    _clone_storages()
    return device


def _clone_storages() -> None:
    """Make ``copy.deepcopy`` work for a device's tensors, whose storage only CUDA can clone."""
    plain = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return plain(self)
        content = torch.empty(0, dtype=torch.uint8, device=self.device)
        return content.set_(self, 0, (self.nbytes(),), (1,)).clone().untyped_storage()

    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]


def _functions(device: FakeAccelerator) -> dict[str, Any]:
    """Return the functions of ``torch.cuda`` that torch and other libraries call here."""
    own: Any = torch.ops.fake_device

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device if device >= 0 else int(own.current_device())
        index = None if device is None else torch.device(device).index
        return int(own.current_device()) if index is None else index

    def exchange(index: int) -> int:
        return int(own.exchange_device(index) if index >= 0 else own.current_device())

    class Device:
        """``torch.cuda.device``: a context in which a device is the current one."""

        def __init__(self, device: Any) -> None:
            self.idx = index_of(device)

        def __enter__(self) -> None:
            self.before = exchange(self.idx)

        def __exit__(self, *_: object) -> None:
            exchange(self.before)

    def free_and_total(device: Any = None) -> tuple[int, int]:
        total = int(own.limit(index_of(device)))
        return total - int(own.used(index_of(device))), total

    def seed_all(seed: int) -> None:
        for index in range(own.device_count()):
            own.seed(index, _signed(seed))

    def rng_state(device: Any = "cuda") -> torch.Tensor:
        return own.rng_state(index_of(device))  # type: ignore[no-any-return]

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        own.set_rng_state(index_of(device), state)

    properties = SimpleNamespace(
        name="Fake GPU", major=8, minor=0, total_memory=1 << 40, multi_processor_count=1
    )
    return {
        "is_available": lambda: own.device_count() > 0,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "init": lambda: None,
        "device": Device,
        "device_count": own.device_count,
        "current_device": own.current_device,
        "set_device": lambda device: exchange(index_of(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "Fake GPU",
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or device.has_bfloat16
        ),
        "mem_get_info": free_and_total,
        "memory_allocated": lambda device=None: own.used(index_of(device)),
        "memory_reserved": lambda device=None: own.used(index_of(device)),
        "max_memory_allocated": lambda device=None: own.peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: own.reset_peak(index_of(device)),
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: own.seed(own.current_device(), _signed(seed)),
        "manual_seed_all": seed_all,
        "get_rng_state": rng_state,
        "set_rng_state": set_rng_state,
        "is_current_stream_capturing": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }


def _signed(seed: int) -> int:
    """Return a seed as the 64-bit integer that an operator takes."""
    return (int(seed) + 2**63) % 2**64 - 2**63
