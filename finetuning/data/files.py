"""Find the files of rows in a folder, and name what is not used."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetuning.data.formats import FORMATS, DataError, format_of

# Other names of the part ``test``, in the order of preference.
_VALIDATION = ("validation", "val", "valid", "dev", "eval")
# Files and folders that file managers, Jupyter and Git create.
_HIDDEN = re.compile(r"[.~@$]|__|lost\+found$")
_SHARDS = re.compile(r"-of-0*(\d+)")
_SHOWN = 8
_NO_ROWS = f"no train{FORMATS[0]} (nor {', '.join(FORMATS[1:-1])} or {FORMATS[-1]})"


@dataclass(frozen=True)
class Parts:
    """The files of a data set; each part has one file, or its shards sorted by name."""

    train: list[Path]
    held_out: list[Path]  # empty if there is no such part
    unused: list[Path]  # other files and folders beside them


def client_folders(path: Path) -> list[Path]:
    """Return the subfolders with training rows, sorted by name; empty if ``path`` is a data set.

    Hidden folders are not clients. Raise a DataError if another subfolder lacks training rows, or
    files of rows lie beside the folders.
    """
    if not path.is_dir():
        return []
    shown = [entry for entry in entries(path) if not _HIDDEN.match(entry.name)]
    own = {file.parent for file in find_part(path, "train")}  # if there are rows of no client
    folders = [entry for entry in shown if entry.is_dir() and entry not in own]
    clients = [folder for folder in folders if find_part(folder, "train")]
    if not clients:
        return []
    beside = [entry for entry in shown if not entry.is_dir() and format_of(entry)]
    if beside or own:
        raise DataError(
            f"{path} has folders of clients, and rows beside them that belong to no client; move "
            "these into a client's folder, or elsewhere",
            list_names(beside or sorted(own)),
        )
    without = [folder for folder in folders if folder not in clients]
    if without:
        files_of_others = "; ".join(
            f"{folder.name} has {list_names(entries(folder))}" for folder in without
        )
        which = f"{len(without)} of the {len(folders)} folders in {path} have {_NO_ROWS}"
        raise DataError(
            f"{which}; rename their files, or move the folders elsewhere", files_of_others
        )
    return clients


def find_parts(path: Path, held_out: str) -> Parts:
    """Return the files of a data set: a file of training rows, or a folder.

    ``held_out`` is the name of the part for evaluation; instead of ``test``, it may be called
    ``validation`` or ``dev``. Raise a DataError if there are no training rows, or a part is
    ambiguous.
    """
    if path.is_file():
        return Parts([path], [], [])
    if not path.is_dir():
        raise DataError(f"{path} doesn't exist")
    train = find_part(path, "train")
    if not train:
        raise DataError(f"{path} has {_NO_ROWS}", "found " + list_names(entries(path)))
    parts = (find_part(path, name) for name in (held_out, *_VALIDATION))
    test = next(filter(None, parts), [])
    used = {*train, *test}
    used |= {file.parent for file in used}
    present = [*entries(path), *(entries(path / "data") if path / "data" in used else [])]
    return Parts(train, test, [entry for entry in present if entry not in used])


def find_part(folder: Path, part: str) -> list[Path]:
    """Return the files of a part: ``part.<format>``, shards, or the files of a folder ``part``.

    They may be in a subfolder ``data``, as on the Hugging Face Hub. Raise a DataError if it isn't
    clear which files are meant, a shard is missing, or the folder was written by ``save_to_disk``.
    """
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        raise DataError(
            f"{folder} was written by save_to_disk; write a Parquet file of each part: "
            f'datasets.load_from_disk("{folder}")["train"].to_parquet("train.parquet")'
        )
    places = [place for place in (folder, folder / "data") if place.is_dir()]
    candidates = [entry for place in places for entry in entries(place) if _is_of(entry, part)]
    kinds = {(entry.parent, format_of(entry) or "", _stem(entry) == part) for entry in candidates}
    if len(kinds) > 1 or (len(candidates) > 1 and _stem(candidates[0]) == part):
        raise DataError(f"{folder} has {list_names(candidates, ' and ')}; keep one")
    files = [
        file for entry in candidates for file in ([entry] if entry.is_file() else _rows_in(entry))
    ]
    counts = {int(match[1]) for file in files if (match := _SHARDS.search(file.name))}
    if counts and counts != {len(files)}:
        counted = f"{folder} has {len(files)} of {max(counts)} shards of {part}"
        raise DataError(counted, list_names(files))
    return files


def list_names(paths: Sequence[Path], separator: str = ", ") -> str:
    """Return the first of the names of files and folders; folders' names end with a slash."""
    names = [path.name + "/" * path.is_dir() for path in paths]
    more = [f"{len(names) - _SHOWN} more"] if names[_SHOWN:] else []
    return separator.join(names[:_SHOWN] + more) or "nothing"


def entries(folder: Path) -> list[Path]:
    """Return the files and folders in a folder, sorted by name.

    Raise a DataError if the folder can't be read, or has a link to nothing.
    """
    try:
        present = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error.strerror}") from error
    for entry in present:
        if entry.is_symlink() and not entry.exists() and not _HIDDEN.match(entry.name):
            raise DataError(f"{entry} is a link to a file or folder that doesn't exist")
    return present


def _is_of(entry: Path, part: str) -> bool:
    """Return whether a file, or a folder with files of rows, belongs to a part."""
    if entry.is_dir():
        return _stem(entry) == part and bool(_rows_in(entry))
    name = "val(idation)?" if part == "val" else part  # the longer name is usual on the Hub
    return bool(re.match(rf"{name}(?![^\W\d_])", _stem(entry))) and format_of(entry) is not None


def _stem(entry: Path) -> str:
    """Return a name in lower case, without the suffix of a format."""
    name = entry.name.lower().removesuffix(".gz")
    return name.removesuffix(format_of(entry) or "")


def _rows_in(folder: Path) -> list[Path]:
    """Return the files of rows in a folder, as Spark and the Hugging Face Hub write them."""
    return [e for e in entries(folder) if e.is_file() and e.name[0] not in "._" and format_of(e)]
