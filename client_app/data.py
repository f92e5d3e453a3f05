"""Which private rows are this client's: its own files, a share of a data set, or generated ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

import numpy as np
from flwr.common.logger import log

from finetuning.data.partition import partition
from finetuning.data.rows import FORMATS, DataError, Row, find_part, parse_messages, read_rows
from finetuning.generated import STYLES, examples
from finetuning.randomness import derive_seed
from finetuning.settings import DataSettings
from strategies.messages import is_name

# Unequal on purpose, as the paper's clients are (table 1), and small enough for a demonstration.
_GENERATED_TRAINING = {"court": 480, "consultation": 320, "reasoning": 240}
_GENERATED_TEST = 64
# "name" or "owner/name".
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class ClientData:
    """A client's name and its rows.

    Attributes:
        name: the institution's.
        train: rows to learn from.
        test: held-out rows.

    """

    name: str
    train: list[Row]
    test: list[Row]


def read_client_data(
    settings: DataSettings, node: Mapping[str, str | int | float | bool], seed: int
) -> ClientData:
    """Find and read a client's data.

    Args:
        settings: the run's data settings.
        node: the SuperNode's ``--node-config`` (``name`` and ``data-path``), or, in simulation,
            Flower's ``partition-id`` and ``num-partitions``.
        seed: the run's.

    Raises:
        DataError: nothing is there, or rows are malformed.

    """
    if "data-path" in node or "partition-id" not in node:
        return _own(settings, node, seed)
    index, count = int(node["partition-id"]), int(node["num-partitions"])
    if not settings.path:
        return _generated(index, seed)
    path = Path(settings.path).expanduser()
    if not path.is_absolute():
        return _share_of_hub(settings, index, count, seed)
    folders = sorted(
        folder for folder in path.glob("*") if folder.is_dir() and find_part(folder, "train")
    )
    if folders:
        return _one_of(folders, index, count, settings, seed)
    return _share(settings, path, index, count, seed)


def _own(
    settings: DataSettings, node: Mapping[str, str | int | float | bool], seed: int
) -> ClientData:
    missing = [key for key in ("name", "data-path") if not node.get(key)]
    if missing:
        raise DataError(
            f"this SuperNode's --node-config lacks {' and '.join(missing)}; start it with "
            '--node-config \'name="court" data-path="/data/court"\''
        )
    if not is_name(str(node["name"])):
        raise DataError(
            f"{node['name']!r} can't be a client's name: at most 64 letters, digits, ' ', '.', '-'"
        )
    path = Path(str(node["data-path"])).expanduser()
    if not path.is_absolute():
        raise DataError(f'data-path = "{path}" must be an absolute path')
    return _from_folder(str(node["name"]), path, settings, seed)


def _generated(index: int, seed: int) -> ClientData:
    """Give one of the three generated clients; further ones repeat the styles with other facts."""
    style, copy = STYLES[index % len(STYLES)], index // len(STYLES)
    name = style if copy == 0 else f"{style}-{copy + 1}"
    own_seed = derive_seed("generated", seed, copy)
    rows = {
        part: [
            Row(parse_messages(value), f"generated {name} {part} {number}", dict(value))
            for number, value in enumerate(examples(style, size, own_seed, part), start=1)  # type: ignore[arg-type]
        ]
        for part, size in (("train", _GENERATED_TRAINING[style]), ("test", _GENERATED_TEST))
    }
    return ClientData(name, rows["train"], rows["test"])


def _one_of(
    folders: list[Path], index: int, count: int, settings: DataSettings, seed: int
) -> ClientData:
    names = ", ".join(folder.name for folder in folders)
    if count > len(folders):
        raise DataError(
            f"{count} SuperNodes, but {folders[0].parent} has {len(folders)} clients ({names}); "
            f"run with --federation-config num-supernodes={len(folders)}"
        )
    if count < len(folders) and index == 0:
        unused = ", ".join(folder.name for folder in folders[count:])
        log(
            WARNING,
            "%d SuperNodes for %d clients: %s won't take part; run with --federation-config "
            "num-supernodes=%d",
            count,
            len(folders),
            unused,
            len(folders),
        )
    return _from_folder(folders[index].name, folders[index], settings, seed)


def _from_folder(name: str, path: Path, settings: DataSettings, seed: int) -> ClientData:
    train, test = _read_parts(path, settings)
    if test is not None:
        return ClientData(name, train, test)
    return _hold_out(name, train, settings.test_fraction, seed)


def _read_parts(path: Path, settings: DataSettings) -> tuple[list[Row], list[Row] | None]:
    """Read ``path/train.*`` and ``path/test.*``, or the one file that ``path`` is."""
    if path.is_file():
        return read_rows(path, skip_bad=settings.skip_bad_rows), None
    if not path.is_dir():
        raise DataError(f"{path} doesn't exist")
    train, test = find_part(path, "train"), find_part(path, "test")
    if train is None:
        raise DataError(f"{path} has no train.jsonl (nor .json, .csv or .parquet)")
    rows = read_rows(train, skip_bad=settings.skip_bad_rows)
    return rows, None if test is None else read_rows(test, skip_bad=settings.skip_bad_rows)


def _share_of_hub(settings: DataSettings, index: int, count: int, seed: int) -> ClientData:
    """Read a data set by its Hugging Face id and give this client's part of it."""
    if not _HUB_ID.fullmatch(settings.path) or Path(settings.path).suffix in FORMATS:
        raise DataError(
            f'data.path = "{settings.path}" must be an absolute path (or start with ~); a run has '
            "a folder of its own, in which relative paths would begin"
        )
    rows = read_rows(settings.path, skip_bad=settings.skip_bad_rows)
    own = partition(rows, count, settings, seed)[index]
    return _hold_out(f"client-{index}", own, settings.test_fraction, seed)


def _share(settings: DataSettings, path: Path, index: int, count: int, seed: int) -> ClientData:
    """Read one data set and give this client's part of it."""
    name = f"client-{index}"
    train, test = _read_parts(path, settings)
    if test is None:
        # Held out after it is divided, so that no client trains on what another one is tested on.
        own = partition(train, count, settings, seed)[index]
        return _hold_out(name, own, settings.test_fraction, seed)
    if settings.partition in {"iid", "length"}:
        return ClientData(
            name,
            partition(train, count, settings, seed)[index],
            partition(test, count, settings, seed)[index],
        )
    # Both parts are divided as one, so that a client is tested on the labels that it has.
    own = partition([*train, *test], count, settings, seed)[index]
    held_out = {id(row) for row in test}
    parts = ClientData(
        name,
        [row for row in own if id(row) not in held_out],
        [row for row in own if id(row) in held_out],
    )
    if not parts.train or not parts.test:
        raise DataError(
            f'data.partition = "{settings.partition}" leaves {name} with {len(parts.train)} '
            f"training and {len(parts.test)} test rows of {path}; without a test file each client "
            "holds out some of its own rows"
        )
    return parts


def _hold_out(name: str, rows: list[Row], fraction: float, seed: int) -> ClientData:
    """Hold out a share of the rows, at least one."""
    if len(rows) < 2:
        raise DataError(f"{name} has {len(rows)} row and no test part; nothing could be held out")
    order = np.random.default_rng(derive_seed("hold out", seed, name)).permutation(len(rows))
    cut = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    return ClientData(
        name, [rows[i] for i in sorted(order[cut:])], [rows[i] for i in sorted(order[:cut])]
    )
