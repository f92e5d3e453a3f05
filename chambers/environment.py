"""Environment variables and folders of child processes, which this process's own would break."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from chambers.errors import CommandError

_HERE = ("127.0.0.1", "localhost", "::1")
# Variables that name folders, which can be relative to the current folder.
_FOLDERS = {"CHAMBERS_CACHE", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"}
# Linux limits the path of a socket to 107 bytes. Ray adds up to 71 to that of its folder, as in
# ``/ray/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store``.
_LONGEST = 107 - 71


def bypass_proxies_locally(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which connections within this machine don't use a proxy.

    Flower's programs connect to each other with ``httpx``, which uses the environment's proxies for
    all addresses, and fails if there is a SOCKS proxy, or a network of IPv6 addresses in
    ``no_proxy``; these are left out.
    """
    listed = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    exempt = [each for each in listed.split(",") if "/" not in each or each.count(":") < 2]
    kept = {
        name: value
        for name, value in environment.items()
        if not (name.lower().endswith("_proxy") and value.lower().startswith("socks"))
    }
    text = ",".join(filter(None, (*exempt, *_HERE)))
    return kept | dict.fromkeys(("no_proxy", "NO_PROXY", "no_grpc_proxy"), text)


def make_child_environment(temporary: Path) -> dict[str, str]:
    """Return the environment of processes that have another current folder than this one.

    ``temporary`` is their folder for temporary files, with a short path (see `short_path`).
    """
    set_here = {n: v for n, v in os.environ.items() if n in _FOLDERS and v and v[0] != "~"}
    folders = {name: str(Path(value).absolute()) for name, value in set_here.items()}
    temporary_folders = dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(temporary))
    return bypass_proxies_locally(os.environ) | folders | temporary_folders


@contextmanager
def short_path(folder: Path) -> Iterator[Path]:
    """Yield a path of a folder in which Ray can create sockets, which is a link to it if necessary.

    Raise ``CommandError`` if no link can be created in ``/tmp``.
    """
    if len(os.fsencode(folder)) <= _LONGEST:
        yield folder
        return
    try:
        short = TemporaryDirectory(prefix="ch-", dir="/tmp")
    except OSError as error:
        raise CommandError(
            f"the path of the folder for temporary files is too long ({folder}), and /tmp can't be "
            f"used instead ({error.strerror}): set TMPDIR to a folder with a shorter path"
        ) from error
    with short as name:
        link = Path(name, "t")
        link.symlink_to(folder)
        yield link
