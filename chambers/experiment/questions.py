"""The questions with which an experiment measures models: a group for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chambers.errors import CommandError
from federation.run_config import Scalar
from finetuning.data.rows import Row, client_folders, find_parts, parse_messages, read_rows
from finetuning.generated import matters
from finetuning.randomness import derive_seed

_CLIENTS = 3


@dataclass(frozen=True)
class Group:
    """The held-out questions on what one client knows.

    Attributes:
        name: Name of the client.
        rows: The questions with their answers.
        articles: The right Article of each; empty if the rows aren't generated.

    """

    name: str
    rows: Sequence[Row]
    articles: Sequence[int]


def client_names(settings: Mapping[str, Scalar]) -> list[str]:
    """Return the names of the clients in an experiment's runs.

    Raises:
        CommandError: The data are neither generated matters nor a folder of clients.

    """
    path = str(settings.get("data.path", ""))
    if path:
        return [folder.name for folder in client_folders(Path(path).expanduser())]
    if settings.get("data.generated") != "matters":
        raise CommandError(
            'an experiment needs data.path, a folder of clients, or data.generated = "matters"'
        )
    return [f"school-{number}" for number in range(1, _CLIENTS + 1)]


def groups_of(settings: Mapping[str, Scalar], seed: int, count: int) -> list[Group]:
    """Return so many questions for each client; none of them was trained on.

    Args:
        settings: Settings of the runs.
        seed: Seed of the runs, which divides the matters.
        count: Number of questions for each client; of files, the first.

    Raises:
        CommandError: A client has no held-out rows.
        DataError: Rows are malformed.

    """
    path = str(settings.get("data.path", ""))
    if path:
        folders = client_folders(Path(path).expanduser())
        files = {folder.name: find_parts(folder)[1] for folder in folders}
        missing = [name for name, file in files.items() if file is None]
        if missing:
            raise CommandError(f"{path}: {', '.join(missing)} have no held-out rows (test.*)")
        return [Group(name, read_rows(file)[:count], []) for name, file in files.items() if file]
    return [
        _generated(name, of_client, seed, count)
        for name, of_client in zip(
            client_names(settings), matters.divide(_CLIENTS, seed), strict=True
        )
    ]


def _generated(name: str, of_client: Sequence[str], seed: int, count: int) -> Group:
    values = matters.questions(of_client, count, derive_seed("experiment", seed, name), "test")
    rows = [
        Row(parse_messages(value), f"{name} question {number}", dict(value))
        for number, value in enumerate(values, start=1)
    ]
    # The questions take turns with the matters.
    articles = [matters.article(of_client[i % len(of_client)]) for i in range(count)]
    return Group(name, rows, articles)
