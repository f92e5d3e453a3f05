"""Read rows from files or from the Hugging Face Hub, without interpreting them."""

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetuning.errors import UserError

FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_GZIP = ".gz"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# An id, and optionally ``:configuration``, ``:configuration:split`` or ``::split``, and a revision.
_DATA_SET_ID = re.compile(
    rf"(?P<path>{_HUB_ID.pattern})(:(?P<name>[\w.-]*)(:(?P<split>\w[\w.-]*))?)?"
    r"(@(?P<revision>\w[\w./-]*))?"
)


class DataError(UserError, ValueError):
    """Data is missing or malformed; the message names files, lines and reasons.

    ``message`` quotes nothing from the data, unless ``public`` is given, which then replaces it
    where data must not be quoted. ``quoted``, such as the message of another library or the names
    of columns, may quote data.
    """

    def __init__(self, message: str, quoted: str = "", public: str = "") -> None:
        super().__init__(f"{message}: {quoted}" if quoted else message)
        self._without_quotes = public or message

    @property
    def public(self) -> str:
        """The message without text from the data or from other libraries."""
        return self._without_quotes

    def at(self, place: str) -> "DataError":
        """Return the same error with the file or row that it is about."""
        return DataError(f"{place}: {self}", public=f"{place}: {self.public}")


def read_values(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Yield each row's origin and raw value; the value of an unreadable row is a `DataError`.

    ``path`` is a file in a supported format, or the id of a data set (see `is_data_set_id`), of
    which the split ``train`` is the default. Raise a DataError if the file or data set is missing,
    or no further rows of it can be read.
    """
    if isinstance(path, str):
        source = f"{path} is not an absolute path, and the data set with this id"
        match = _DATA_SET_ID.fullmatch(path)
        options = {key: text for key, text in match.groupdict().items() if text} if match else {}
        yield from _number(path, _stream(source, **{"path": path, **options}))
        return
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    readers = {".json": _json_array, ".csv": _csv_rows, ".parquet": _parquet}
    suffix = format_of(path)
    if suffix is None:
        raise DataError(
            f"{path}: the format must be one of {', '.join(FORMATS)}; all but the last may be "
            f"compressed ({FORMATS[0]}{_GZIP})"
        )
    try:
        yield from readers.get(suffix, _json_lines)(path)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} can't be read: {reason}") from error


def format_of(path: Path) -> str | None:
    """Return the suffix of the file's format in lower case, or None if it isn't supported."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(_GZIP)).suffix
    # Parquet has compression of its own.
    return suffix if suffix in FORMATS[: -1 if name.endswith(_GZIP) else None] else None


def _open(path: Path) -> Any:
    return gzip.open(path) if path.name.lower().endswith(_GZIP) else path.open("rb")


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of a Hugging Face Hub id: "name" or "owner/name"."""
    return _HUB_ID.fullmatch(text) is not None


def is_data_set_id(text: str) -> bool:
    """Return whether a text names a data set of the Hub, and doesn't look like a file's path.

    ``owner/name:configuration:split@revision`` has all parts; all but the name are optional.
    """
    return _DATA_SET_ID.fullmatch(text) is not None and format_of(Path(text)) is None


def _number(path: Path | str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(values, start=1):
        yield f"{path}, row {number}", value


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                yield origin, parse_json(line)
            except DataError as error:
                yield origin, error


def _json_array(path: Path) -> Iterator[tuple[str, Any]]:
    """Read an array of rows, or JSON Lines, which often use the suffix ``.json`` too."""
    try:
        with _open(path) as file:
            value = parse_json(file.read())
    except DataError as error:
        if getattr(error.__cause__, "msg", None) != "Extra data":
            raise error.at(str(path)) from error
        yield from _json_lines(path)
        return
    yield from _number(path, value if isinstance(value, list) else [value])


def parse_json(data: bytes) -> Any:
    """Parse JSON; raise a DataError if it is malformed, or an object has a key twice."""
    try:
        text = data.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_object) if data.strip() else []
    except DataError:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"not JSON: {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise DataError("JSON is nested too deeply") from error
    except ValueError as error:
        raise DataError("JSON has a number with too many digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    refuse_duplicates([key for key, _ in pairs], "has a key twice")
    return dict(pairs)


def refuse_duplicates(names: list[str], what: str) -> None:
    """Raise a DataError with the names that occur more than once, if any."""
    if len(set(names)) < len(names):
        raise DataError(what, ", ".join(sorted({repr(n) for n in names if names.count(n) > 1})))


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Read each cell as text without conversion, because a number or "NA" can be an answer."""
    csv.field_size_limit(2**31 - 1)
    with (
        _open(path) as content,
        io.TextIOWrapper(content, "utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        # Strict, because otherwise an unclosed quote would extend to the end of the file.
        reader = csv.reader(file, strict=True)
        columns: list[str] = []
        while True:
            origin = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield origin, DataError(f"not CSV: {error}")
                continue
            if cells is None:
                return
            # Excel writes empty rows as commas, and can begin with a mark that cells end so.
            if not any(cells) or (not columns and cells == ["sep=", ""]):
                continue
            if not columns:
                columns = [cell.strip() for cell in cells]
                _check_header(path, columns)
            else:
                yield origin, _table_row(columns, cells)


def _check_header(path: Path, columns: list[str]) -> None:
    line = ",".join(columns)
    try:
        line.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path} is not UTF-8") from None
    if len(columns) == 1 and (";" in line or "\t" in line):
        raise DataError(f"{path}: the cells of the header must be separated by commas")
    refuse_duplicates(columns, f"{path} has two columns of the same name")


def _table_row(columns: list[str], cells: list[str]) -> dict[str, str] | DataError:
    if len(cells) != len(columns):
        counts = f"has {len(cells)} cells, but the header has {len(columns)}"
        return DataError(counts, ", ".join(map(repr, columns)))
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return DataError("not UTF-8")
    return dict(zip(columns, cells, strict=True))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    return _number(path, _stream(path, path="parquet", data_files=glob.escape(str(path))))


def _stream(source: Path | str, **options: str) -> Iterable[Any]:
    """Stream rows with ``datasets``, so that the library's cache keeps no copy of private text."""
    from datasets import load_dataset

    try:
        yield from load_dataset(**{"split": "train", **options}, streaming=True)
    except Exception as error:  # Third-party readers can raise any exception.
        raise DataError(f"{source} can't be read", str(error)) from error
