"""Fixtures of the accelerator tests: devices, and a small checkpoint with its adapter."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.accelerator.device import FakeAccelerator, GPUs
from tests.client_app.conftest import site  # noqa: F401  # a fixture
from tests.split import clients
from tests.split.conftest import base, beginning  # noqa: F401  # fixtures


def _installed(config: pytest.Config) -> FakeAccelerator | str:
    plugin = config.pluginmanager.get_plugin("tests.accelerator.plugin")
    return "`make test-accelerator` runs it" if plugin is None else config.stash[plugin.DEVICE]


def _fake(request: pytest.FixtureRequest) -> FakeAccelerator:
    found = _installed(request.config)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def device(request: pytest.FixtureRequest) -> FakeAccelerator:
    """Return the fake accelerator, or skip the test if it is not installed."""
    return _fake(request)


@pytest.fixture
def any_device(request: pytest.FixtureRequest) -> FakeAccelerator | GPUs:
    """Return the GPUs of this machine if it has any, else the fake accelerator."""
    return GPUs() if torch.version.cuda and torch.cuda.is_available() else _fake(request)


@pytest.fixture(autouse=True)
def _fresh_parts() -> None:
    """Clear the cache of parts, which an earlier test may have loaded without a device."""
    clients.load_ends.cache_clear()


@contextmanager
def _waits_of_cuda() -> Iterator[list[str]]:
    """Yield a list of the places where the host waits for a real GPU within the context."""
    found: list[str] = []

    def show(message: Warning | str, _: object, file: str, line: int, *__: object) -> None:
        if "synchroniz" in str(message):
            found.append(f"{file}:{line}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def assert_waits(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that limits how often the host waits in each additional step or token.

    Waits are reported by the fake accelerator, or by a real GPU if there is one.
    """
    found = _installed(request.config)
    if isinstance(found, FakeAccelerator):
        watch = found.waits
    elif torch.cuda.is_available():
        watch = _waits_of_cuda
    else:
        pytest.skip(found)

    def check(run: Callable[[int], object], first: int, second: int, most: float) -> None:
        run(first)  # so that one-time work is done
        counts = []
        for count in (first, second):
            with watch() as places:
                run(count)
            counts.append(Counter(places))
        further = second - first
        each = (counts[1].total() - counts[0].total()) / further
        print(f"{each:.2f} waits each, of at most {most}:")
        for place, number in (counts[1] - counts[0]).most_common():
            print(f"{number / further:6.2f} {place}")
        assert each <= most, "more waits than expected, at the lines above"

    return check
