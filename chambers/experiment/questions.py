"""The questions for measuring an experiment's models: a group for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chambers.errors import CommandError
from chambers.experiment.leaks import MEMBERS, Secrets
from chambers.experiment.plan import of_variant
from chambers.settings import GENERATED_CLIENTS
from federation.run_config import RunConfig
from finetuning.data.files import client_folders, find_parts
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.generated import matters, persons
from finetuning.generated.clients import generate_client, name_client
from finetuning.randomness import derive_seed
from finetuning.tasks.question import Question
from finetuning.tasks.reading import held_out_part, read_questions, read_task_rows
from finetuning.tasks.tasks import TASKS


@dataclass(frozen=True)
class Group:
    """The held-out questions for one client, or for a data set that all clients share."""

    name: str  # names of the variant and the client
    rows: Sequence[Row]
    articles: Sequence[int] = ()  # each row's right Article; empty with data.path
    # Beginning of the answer for each Article, keyed by its number; empty with data.path.
    beginnings: Mapping[int, str] = field(default_factory=dict)
    questions: Sequence[Question] = ()  # with candidate answers; empty unless data.task has them
    client: str = ""  # whose training rows are attacked; empty if all clients share a data set


def client_names(config: RunConfig) -> list[str]:
    """Return the names of the clients with data of their own; empty if they share a data set.

    Raise ``CommandError`` if the data are neither generated matters nor files.
    """
    if config.data.path:
        return [folder.name for folder in client_folders(Path(config.data.path).expanduser())]
    if config.data.generated == "styles":
        raise CommandError('an experiment needs data.path or data.generated = "matters"')
    return [name_client(config.data.generated, index) for index in range(GENERATED_CLIENTS)]


def groups_of(config: RunConfig, variant: str, seed: int, count: int) -> list[Group]:
    """Return at most ``count`` held-out questions for each client (the first ones of a file).

    Raise ``CommandError`` if a client has no held-out rows, or ``DataError`` if rows are malformed.
    """
    names = client_names(config)
    if config.data.path:
        path = Path(config.data.path).expanduser()
        folders = {of_variant(variant, name): path / name for name in names}
        folders = folders or {variant or path.name: path}
        own_clients = names or [""]
        return [
            _read(name, folder, config, count, client)
            for (name, folder), client in zip(folders.items(), own_clients, strict=True)
        ]
    groups = []
    for name, own in zip(names, matters.divide(len(names), seed), strict=True):
        values = matters.write_questions(own, count, derive_seed("experiment", seed, name), "test")
        rows = [
            Row(parse_messages(value), f"{name} question {number}", dict(value))
            for number, value in enumerate(values, start=1)
        ]
        # The questions cycle through the matters.
        articles = [matters.article(own[i % len(own)]) for i in range(count)]
        group = of_variant(variant, name)
        groups.append(Group(group, rows, articles, matters.beginnings(), client=name))
    return groups


def secrets_of(config: RunConfig, client: str) -> Secrets:
    """Return what an attacker looks for in the training rows of one of a run's clients."""
    data, most = config.data, config.data.rows or None
    if data.path:
        parts = find_parts(Path(data.path).expanduser() / client, held_out_part(data))
        return Secrets(read_task_rows(parts.train, data)[:most][:MEMBERS])
    index = client_names(config).index(client)
    if data.generated == "persons":
        people = persons.draw_people(index, config.seed)
        return Secrets((), people, persons.draw_numbers(index, config.seed))
    generated = generate_client(
        kind=data.generated,
        index=index,
        count=GENERATED_CLIENTS,
        seed=config.seed,
        rows=data.rows,
    )
    values = generated.train[:MEMBERS]
    return Secrets([Row(parse_messages(value), "a training row", dict(value)) for value in values])


def _read(name: str, path: Path, config: RunConfig, count: int, client: str) -> Group:
    file = find_parts(path, held_out_part(config.data)).held_out
    if not file:
        raise CommandError(f"{path} has no held-out rows ({held_out_part(config.data)}.*)")
    task = TASKS.get(config.data.task)
    questions = read_questions(file, task)[:count] if task and task.is_cloze else []
    return Group(
        name, read_task_rows(file, config.data)[:count], questions=questions, client=client
    )
