"""``chambers data``: show how rows are read, before anything is trained."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from chambers.errors import CommandError
from chambers.sources import argument
from federation.names import RULE, folded, is_name
from federation.run_config import RunConfig, parse_run_config
from finetuning.data.files import Parts, client_folders, entries, find_parts, list_names
from finetuning.data.formats import DataError, is_data_set_id
from finetuning.data.rows import Row
from finetuning.tasks.reading import held_out_part, read_task_rows

if TYPE_CHECKING:
    from finetuning.data.tokenization import Example

_SHOWN = 3  # examples, and rows that are left out
_LINES = 20  # rows, and clients before training, with a line of their own


@dataclass(frozen=True)
class Data:
    """Show how rows are read, before anything is trained.

    \b
      chambers data /data/legal
      chambers data /data/legal/court model.name=/models/qwen data.max-length=512

    PATH has rows as in chambers train: a folder with one folder per client, or one data set.
    Settings are given as for chambers train. The output has the layouts and the numbers of rows of
    each client, three rows as the model sees them, with ⟦targets⟧ marked, and the rows that are
    shortened or refused, with the reason. The exit status is 1 if rows or clients are refused.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    path: Annotated[str, argument("PATH")]
    settings: Annotated[list[str] | None, argument("[PRESET|FILE.toml|KEY=VALUE]…")] = None

    def __call__(self) -> int:
        """Read the rows and show them; return 0 only if nothing is refused."""
        from chambers.settings import read_settings, with_least_nodes

        values = read_settings([*(self.settings or []), f"data.path={self.path}"])
        config = parse_run_config(with_least_nodes(values))
        shown, refused = 0, False
        for name, source in sources_of(config).items():
            try:
                reading = read_source(name, source, config, keep_going=True)
            except DataError as error:
                print(f"{name}: refused: {error}")
                refused = True
                continue
            refused |= bool(reading.left_out)
            print(reading.line)
            for layout, count in Counter(row.layout for row in reading.rows).items():
                print(f"  {count} rows with {layout}")
            lines = [f"refused: {origin}: {reason}" for origin, reason in reading.left_out]
            cut = f"cut by data.max-length = {config.data.max_length}: "
            for each in (lines, [cut + origin for origin in reading.cut]):
                more = [f"… and {len(each) - _LINES} more"] if each[_LINES:] else []
                print(*(f"  {line}\n" for line in each[:_LINES] + more), sep="", end="")
            for example in reading.examples[: _SHOWN - shown]:
                text = _marked(example, _tokenizer(config.model.name))
                print(f"  as the model sees {example.origin}:\n{text}")
                shown += 1
        return int(refused)


@dataclass
class Reading:
    """The rows of a client, or of a data set, as they are read."""

    line: str = ""  # what was read, left out, cut, and not used
    rows: list[Row] = field(default_factory=list)
    left_out: list[tuple[str, DataError]] = field(default_factory=list)  # origins and reasons
    cut: list[str] = field(default_factory=list)  # origins of rows too long for data.max-length
    examples: "list[Example]" = field(default_factory=list)  # one of each layout, and more
    longest: int = 0  # number of tokens


def sources_of(config: RunConfig) -> dict[str, Path | str]:
    """Return the folders of the clients by name, or the one file, folder or id of a data set.

    Print what is not used beside the folders of clients. Raise ``CommandError`` if a folder's name
    can't be a client's, or ``DataError`` if there is no such data.
    """
    path = Path(config.data.path).expanduser()
    if not path.is_absolute():
        if not is_data_set_id(config.data.path):
            raise CommandError(f'data.path = "{path}": there is no such file or folder')
        return {config.data.path: config.data.path}
    if not path.exists():
        raise CommandError(f'data.path = "{path}" doesn\'t exist')
    folders = client_folders(path)
    if not folders:
        return {path.name: path}
    if unused := [entry for entry in entries(path) if entry not in folders]:
        print(f"{path}: not used: {list_names(unused)}", file=sys.stderr)
    wrong = [folder for folder in folders if not is_name(folder.name)]
    if wrong:
        raise CommandError(f"the name of the client {str(wrong[0])!r} {RULE}; rename the folder")
    names = Counter(folded(folder.name) for folder in folders)
    if twice := [folder.name for folder in folders if names[folded(folder.name)] > 1]:
        raise CommandError(f"{path}: some file systems confuse the names {', '.join(twice)}")
    return {folder.name: folder for folder in folders}


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> Any:
    """Load a model's tokenizer, without downloading the weights."""
    from finetuning.model.locating import locate_description
    from finetuning.model.tokenizer import load_tokenizer

    return load_tokenizer(locate_description(model))


def read_source(
    name: str, source: Path | str, config: RunConfig, keep_going: bool = False
) -> Reading:
    """Read and tokenize the rows of a client or of a data set.

    Rows that can't be used are left out if ``keep_going`` or ``data.skip-bad-rows``; otherwise,
    raise a ``DataError`` with the reasons.
    """
    settings, reading = config.data, Reading()
    part = held_out_part(settings)
    files = Parts([], [], []) if isinstance(source, str) else find_parts(source, part)

    def leave_out(origin: str, reason: DataError) -> None:
        reading.left_out.append((origin, reason))

    told = []
    for part, found in (("training", files.train or source), ("held-out", files.held_out)):
        if found:
            then = leave_out if keep_going or settings.skip_bad_rows else None
            rows = read_task_rows(found, settings, then)
            from finetuning.data.tokenization import tokenize  # slow, so only with good rows

            tokenizer = _tokenizer(config.model.name)
            examples, report = tokenize(rows, tokenizer, settings.max_length, then)
            used = [row for index, row in enumerate(rows) if index not in report.rejected]
            where = f" in {list_names(found)}" if isinstance(found, list) else ""
            told += [f"{len(used)} {part} rows{where}" + f" ({report.cut})" * bool(report.cut)]
            first = {rows[example.row].layout: example for example in reversed(examples)}
            chosen = (*reversed(first.values()), *examples[:_SHOWN])
            reading.examples += {example.row: example for example in chosen}.values()
            reading.cut += [rows[index].origin for index in sorted(report.cut_rows)]
            reading.rows += used
            lengths = [len(example.tokens) for example in examples]
            reading.longest = max(reading.longest, *lengths, 0)
    told += [f"{len(reading.left_out)} rows left out"] * bool(reading.left_out)
    columns = dict.fromkeys(key for row in reading.rows for key in row.unused)
    told += [f"columns not used: {', '.join(columns)}"] * bool(columns)
    told += [f"files not used: {list_names(files.unused)}"] * bool(files.unused)
    reading.line = f"{name}: {'; '.join(told)}"
    return reading


def check_data(config: RunConfig, clients: int) -> int:
    """Read and tokenize the rows of all clients, and print a line for each.

    Return the number of tokens of the longest row. Raise ``CommandError`` or ``DataError`` if there
    are too few clients or rows, or rows can't be used; the message names files and lines.
    """
    settings, sources = config.data, sources_of(config)
    path = Path(settings.path).expanduser()
    has_folders = path not in sources.values() and settings.path not in sources
    if settings.pool:
        wanted = list(sources) if settings.pool == "*" else settings.pooled_names
        if unknown := [name for name in wanted if name not in sources]:
            raise CommandError(f'data.pool = "{settings.pool}": {unknown[0]} doesn\'t exist')
        sources = {name: sources[name] for name in wanted}
    elif has_folders and clients > len(sources):
        names = ", ".join(sources)
        raise CommandError(f"--clients {clients}: {path} has {len(sources)} clients ({names})")
    elif has_folders and clients < len(sources):
        print("not in this run:", ", ".join(list(sources)[clients:]), file=sys.stderr)
        sources = dict(list(sources.items())[:clients])
    longest = 0
    for number, (name, source) in enumerate(sources.items()):
        reading = read_source(name, source, config)
        longest = max(longest, reading.longest)
        rows = len(reading.rows)
        if not has_folders and rows < clients:
            raise CommandError(f"{path}: {rows} rows can't be divided among {clients} clients")
        # Of many clients, only those whose rows aren't all used have a line.
        if number < _LINES or reading.left_out or reading.cut:
            print(reading.line, file=sys.stderr)
        for origin, reason in reading.left_out[:_SHOWN]:
            print(f"  left out: {origin}: {reason}", file=sys.stderr)
    return longest


def _marked(example: "Example", tokenizer: Any) -> str:
    """Return an example's text with its targets in brackets."""
    pairs = zip(example.is_target.tolist(), example.tokens.tolist(), strict=True)
    pieces = [
        (is_target, tokenizer.decode([token for _, token in run]))
        for is_target, run in groupby(pairs, key=lambda pair: pair[0])
    ]
    return "".join(f"⟦{text}⟧" if is_target else text for is_target, text in pieces)
