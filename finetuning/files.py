"""Atomic writes of files and folders, and the cache folder."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """Return the folder for derived files: ``$CHAMBERS_CACHE`` or the user's cache."""
    return Path(os.environ.get("CHAMBERS_CACHE") or platformdirs.user_cache_path("chambers"))


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it to ``target`` if the block succeeds.

    A reader sees either the old content or the new, never a part of it. If the block raises, the
    temporary file or folder is removed and ``target`` stays as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{os.getpid()}.new")
    _remove(aside)
    try:
        yield aside
        _flush(aside)
        if target.is_dir():
            # A folder can't be renamed over a folder that has content.
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            _remove(old)
            target.rename(old)
            aside.rename(target)
            _remove(old)
        else:
            aside.replace(target)
    finally:
        _remove(aside)


def _flush(path: Path) -> None:
    """Write content to the disk, since a rename can otherwise reach it before the content does."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as content:
            os.fsync(content.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
