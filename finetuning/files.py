"""Write files and folders atomically, report full disks, and locate the cache folder."""

import base64
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock
from safetensors import SafetensorError

from finetuning.errors import UserError

Stamps = tuple[tuple[str, int, int], ...]

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Names of temporary files and folders beside their targets; see ``replacing``.
_ASIDE = re.compile(r"\.(?P<target>.+)\.\d+\.(?P<kind>new|old)")


class DiskFullError(UserError, OSError):
    """A disk is full or a quota is exceeded; the message names the folder."""


def cache_directory() -> Path:
    """Return the folder for derived files: ``$CHAMBERS_CACHE`` or the user's cache folder."""
    return Path(os.environ.get("CHAMBERS_CACHE") or platformdirs.user_cache_path("chambers"))


def cached(target: Path, write: Callable[[Path], object]) -> Path:
    """Return a file or folder of the cache; if it is missing, call ``write`` with a path to write.

    While one process writes it, other processes wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            with replacing(target) as aside:
                write(aside)
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it to ``target`` if the block succeeds.

    A reader sees either the old or the new content in full. If the block raises, the temporary file
    or folder is removed and ``target`` is unchanged. Raise a DiskFullError if the content doesn't
    fit on the disk.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}.new")
    with filling(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        try:
            yield aside
            _flush(aside)
            if target.is_dir():
                # A non-empty folder can't be replaced by a rename.
                old = target.with_name(f".{target.name}.{os.getpid()}.old")
                _remove(old)
                target.rename(old)
                aside.rename(target)
                _remove(old)
            else:
                aside.replace(target)
        except OSError as error:
            if error.filename == str(aside):
                error.filename = str(target)
            raise
        finally:
            _remove(aside)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary content that killed processes left behind in a folder and its subfolders.

    If a folder's replacement was interrupted between two renames, its old content is restored. No
    other process may write to the folder during the call.
    """
    for aside in list(folder.rglob(".*")):
        match = _ASIDE.fullmatch(aside.name)
        if match is None:
            continue
        target = aside.with_name(match["target"])
        if match["kind"] == "old" and not target.exists():
            aside.rename(target)
        else:
            _remove(aside)


def remove_whole(folder: Path) -> None:
    """Remove a folder if it exists; rename it first, so that readers never see a part of it."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    _remove(aside)
    if folder.exists():
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def filling(folder: Path) -> Iterator[None]:
    """Convert disk-full errors raised in the context to a `DiskFullError` that names the folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports the system's error number only in the message.
        is_in_message = any(f"(os error {number})" in str(error) for number in _FULL)
        if getattr(error, "errno", None) not in _FULL and not is_in_message:
            raise
        raise DiskFullError(f"no space is left on the disk of {folder}: free some space") from error


def write_file(target: Path, content: str | bytes) -> None:
    """Write or replace a file; see `replacing`. Text is encoded in UTF-8."""
    with replacing(target) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_matching(
    source: Path, patterns: Iterable[str], target: Path, left_out: Iterable[str] = ()
) -> None:
    """Copy the files in a folder whose names match one pattern, and none of those left out."""
    for pattern in patterns:
        for file in source.glob(pattern):
            if not any(map(file.match, left_out)):
                shutil.copyfile(file, target / file.name)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, which lacks some values of Python and Parquet.

    Numbers that aren't finite become null, bytes become base64, and other objects their text.
    """

    def other(each: Any) -> str:
        return base64.b64encode(each).decode() if isinstance(each, bytes) else str(each)

    content = json.loads(json.dumps(value, default=other), parse_constant=lambda _: None)
    return json.dumps(content, indent=indent, ensure_ascii=False)


def write_json(target: Path, content: Any) -> None:
    """Write or replace an indented JSON file; see `json_text` and `replacing`."""
    write_file(target, json_text(content, indent=1) + "\n")


def write_secret(target: Path, content: bytes) -> None:
    """Write or replace a file that only its owner can read."""
    with replacing(target) as aside:
        aside.touch(mode=0o600, exist_ok=False)
        aside.write_bytes(content)


def stamps(path: Path) -> Stamps:
    """Return the path, size and modification time of a file, or of all files in a folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _flush(path: Path) -> None:
    """Flush content to the disk; otherwise a rename could reach the disk before the content."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as content:
            os.fsync(content.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
