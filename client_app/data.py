"""Read or generate a client's private rows, which can also be a share of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from logging import WARNING
from pathlib import Path

import numpy as np
from flwr.common import log

from federation.run_config import RunConfig, Scalar
from finetuning.data.files import client_folders, find_parts
from finetuning.data.formats import DataError, is_data_set_id
from finetuning.data.layouts import parse_messages
from finetuning.data.partition import partition
from finetuning.data.rows import Row
from finetuning.generated import clients
from finetuning.randomness import derive_seed
from finetuning.settings import DataSettings
from finetuning.tasks.reading import held_out_part, read_task_rows

# Name of the client with the pooled rows of several clients: the baseline in FedJudge, table 2.
CENTER = "center"


@dataclass(frozen=True)
class ClientData:
    """A client's name and its rows."""

    name: str
    train: list[Row]
    test: list[Row]  # held-out rows


def read_client_data(settings: DataSettings, node: Mapping[str, Scalar], seed: int) -> ClientData:
    """Read a client's data, given a run's data settings and seed.

    ``node`` has a site's ``name`` and ``data-path`` or, in simulation, Flower's ``partition-id``
    and ``num-partitions``. Raise ``DataError`` if the data is missing, or rows are
    malformed.
    """
    reader = _Reader(settings, seed)
    if "data-path" in node:
        if settings.pool:
            raise DataError(
                f'data.pool = "{settings.pool}" is for simulations, but this SuperNode has rows of '
                "its own"
            )
        if settings.rows:
            raise DataError(
                f"data.rows = {settings.rows} is for simulations; a site uses all of its rows"
            )
        return reader.folder(str(node["name"]), Path(str(node["data-path"])))
    index, count = int(node["partition-id"]), int(node["num-partitions"])
    if settings.pool:
        return reader.pool(count)
    if not settings.path:
        return reader.generated(index, count)
    path = Path(settings.path).expanduser()
    if not path.is_absolute():
        if not is_data_set_id(settings.path):
            raise DataError(
                f'data.path = "{settings.path}" must be an absolute path (or start with ~): '
                "relative paths would refer to the folder in which Flower runs the app"
            )
        train = read_task_rows(settings.path, settings)
        return reader.share(train=train, test=None, index=index, count=count)
    folders = _client_folders(path)
    if folders:
        own = _one_of(folders, index, count)
        return reader.folder(own.name, own)
    return reader.share(*reader.parts(path), index, count)


def _client_folders(path: Path) -> list[Path]:
    return _folders_at(path, path.stat().st_mtime_ns if path.is_dir() else 0)


@lru_cache(maxsize=1)  # an actor simulates many clients, each of which needs all names
def _folders_at(path: Path, changed: int) -> list[Path]:
    return client_folders(path)


def client_name(settings: DataSettings, node: Mapping[str, Scalar]) -> str:
    """Return the name of a simulated client without reading or generating its rows.

    Raise ``DataError`` if the data is divided into fewer folders than there are clients.
    """
    index, count = int(node["partition-id"]), int(node["num-partitions"])
    if settings.pool:
        return CENTER
    if not settings.path:
        return clients.name_client(settings.generated, index)
    path = Path(settings.path).expanduser()
    folders = _client_folders(path) if path.is_absolute() else []
    return _one_of(folders, index, count).name if folders else f"client-{index}"


def own_rank(config: RunConfig, node: Mapping[str, Scalar]) -> int:
    """Return the rank of this client's adapter, given that ``adapter.ranks`` is set.

    Raise ``DataError`` if the site file has no rank, or one above the run's.
    """
    settings = config.adapter
    if numbers := settings.numbered_ranks:
        if "partition-id" not in node:
            raise DataError(
                f'adapter.ranks = "{settings.ranks}" is for simulations; with adapter.ranks = '
                '"site", the site files contain the ranks'
            )
        return numbers[int(node["partition-id"]) % len(numbers)]
    rank = int(node.get("rank", 0))
    if not 0 < rank <= settings.rank:
        raise DataError(
            f'adapter.ranks = "site" needs a rank up to adapter.rank = {settings.rank} in the site '
            f"file, which has {rank or 'none'}"
        )
    return rank


def _one_of(folders: list[Path], index: int, count: int) -> Path:
    """Return the folder of one of ``count`` clients."""
    fix = f"run with --federation-config num-supernodes={len(folders)}"
    if count > len(folders):
        names = ", ".join(folder.name for folder in folders)
        raise DataError(
            f"there are {count} SuperNodes, but {folders[0].parent} has {len(folders)} clients "
            f"({names}); {fix}"
        )
    if count < len(folders) and index == 0:
        unused = ", ".join(folder.name for folder in folders[count:])
        text = "%d SuperNodes for %d clients: %s won't take part; %s"
        log(WARNING, text, count, len(folders), unused, fix)
    return folders[index]


@dataclass(frozen=True)
class _Reader:
    """Reads and splits rows, given a run's data settings and seed."""

    settings: DataSettings
    seed: int

    def generated(self, index: int, count: int) -> ClientData:
        """Generate the rows of one of ``count`` clients."""
        try:
            kind, number = self.settings.generated, self.settings.rows
            client = clients.generate_client(kind, index, count, self.seed, number)
        except ValueError as error:
            raise DataError(str(error)) from error
        rows = {
            part: [
                Row(parse_messages(value), f"generated {client.name} {part} {number}", dict(value))
                for number, value in enumerate(values, start=1)
            ]
            for part, values in (("train", client.train), ("test", client.test))
        }
        return ClientData(client.name, **rows)

    def pool(self, count: int) -> ClientData:
        """Return one client with the combined rows of several clients."""
        setting = f'data.pool = "{self.settings.pool}"'
        if count != 1:
            raise DataError(
                f"{setting} is for one client, but there are {count} SuperNodes; run with "
                "--federation-config num-supernodes=1"
            )
        path = Path(self.settings.path).expanduser()
        folders = _client_folders(path) if self.settings.path and path.is_absolute() else []
        if self.settings.path and not folders:
            raise DataError(
                f"{setting}: {self.settings.path} has no folders of clients; without data.pool, a "
                "single SuperNode has all rows of a data set"
            )
        own = {}
        if not folders:
            generated = [self.generated(i, clients.CLIENTS) for i in range(clients.CLIENTS)]
            own = {client.name: client for client in generated}
        names = [folder.name for folder in folders] or list(own)
        wanted = names if self.settings.pool == "*" else self.settings.pooled_names
        unknown = sorted(set(wanted) - set(names))
        if unknown or not wanted:
            which = f"there is no client {', '.join(unknown)}" if unknown else "it names no client"
            raise DataError(f"{setting}: {which}; there are {', '.join(names)}")
        pooled = [
            own[name] if own else self.folder(name, path / name) for name in sorted(set(wanted))
        ]
        return ClientData(
            CENTER,
            train=[row for client in pooled for row in client.train],
            test=[row for client in pooled for row in client.test],
        )

    def folder(self, name: str, path: Path) -> ClientData:
        """Read a client's folder or file."""
        train, test = self.parts(path)
        if test is None:
            return self.limit(self.hold_out(name, train))
        return self.limit(ClientData(name, train, test))

    def limit(self, data: ClientData) -> ClientData:
        """Return the data with at most ``data.rows`` training rows."""
        return replace(data, train=data.train[: self.settings.rows or None])

    def parts(self, path: Path) -> tuple[list[Row], list[Row] | None]:
        """Read the training and held-out rows of a folder, or of the single file ``path``."""
        files = find_parts(path, held_out_part(self.settings))
        rows = read_task_rows(files.train, self.settings)
        return rows, read_task_rows(files.held_out, self.settings) if files.held_out else None

    def share(self, train: list[Row], test: list[Row] | None, index: int, count: int) -> ClientData:
        """Return one client's share of a data set."""
        name, kind = f"client-{index}", self.settings.partition

        def divide(rows: list[Row]) -> list[Row]:
            return partition(rows=rows, parts=count, settings=self.settings, seed=self.seed)[index]

        if test is None:
            # Hold out rows after splitting, so that no client trains on another client's test rows.
            return self.limit(self.hold_out(name, divide(train)))
        if kind in {"iid", "length"}:
            return self.limit(ClientData(name, divide(train), divide(test)))
        # Split both parts together, so that a client is tested on the labels it was trained on.
        own = divide([*train, *test])
        held_out = {id(row) for row in test}
        parts = ClientData(
            name,
            train=[row for row in own if id(row) not in held_out],
            test=[row for row in own if id(row) in held_out],
        )
        if not parts.train or not parts.test:
            raise DataError(
                f'data.partition = "{kind}" leaves {name} with {len(parts.train)} training and '
                f"{len(parts.test)} test rows of {self.settings.path}; remove the test file, so "
                "that each client holds out some of its rows"
            )
        return self.limit(parts)

    def hold_out(self, name: str, rows: list[Row]) -> ClientData:
        """Hold out a share of the rows, at least one row.

        Rows with the same origin, such as several questions on a passage, stay together.
        """
        origins = list(dict.fromkeys(row.origin for row in rows))
        if len(origins) < 2:
            count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
            where = f", all from {origins[0]}," if len(rows) > 1 else ""
            raise DataError(f"{name} has {count}{where} and no test file; nothing can be held out")
        seed = derive_seed("hold out", self.seed, name)
        order = np.random.default_rng(seed).permutation(len(origins))
        cut = min(max(1, round(self.settings.test_fraction * len(origins))), len(origins) - 1)
        held_out = {origins[number] for number in order[:cut]}
        return ClientData(
            name,
            train=[row for row in rows if row.origin not in held_out],
            test=[row for row in rows if row.origin in held_out],
        )
