"""Read rows from files or from the Hugging Face Hub, without interpreting them."""

import csv
import glob
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetuning.errors import UserError

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class DataError(UserError, ValueError):
    """Data is missing or malformed; the message names files, lines and reasons.

    ``message`` quotes nothing from the data; ``quoted``, which is the message of another library,
    may quote data.
    """

    def __init__(self, message: str, quoted: str = "") -> None:
        super().__init__(f"{message}: {quoted}" if quoted else message)
        self._without_quotes = message

    @property
    def public(self) -> str:
        """The message without text from other libraries."""
        return self._without_quotes


def read_values(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Yield each row's origin and raw value; the value of an unreadable row is a `DataError`.

    ``path`` is a file in a supported format, or the id of a data set with a split ``train``. Raise
    a DataError if the file or data set is missing, or no further rows of it can be read.
    """
    if isinstance(path, str):
        source = f"{path} is not an absolute path, and the data set with this id"
        yield from _number(path, _stream(path, source))
        return
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    if path.suffix not in FORMATS:
        raise DataError(f"{path}: the format must be one of {', '.join(FORMATS)}")
    readers = {".jsonl": _json_lines, ".json": _json_array, ".csv": _csv_rows, ".parquet": _parquet}
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def is_hub_id(text: str) -> bool:
    """Return whether a text has the form of a Hugging Face Hub id: "name" or "owner/name"."""
    return _HUB_ID.fullmatch(text) is not None


def is_data_set_id(text: str) -> bool:
    """Return whether a text has the form of a data set id, but not of a relative file path."""
    return is_hub_id(text) and Path(text).suffix not in FORMATS


def _number(path: Path | str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, value in enumerate(values, start=1):
        yield f"{path}, row {number}", value


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                yield origin, _parse_json(line)
            except DataError as error:
                yield origin, error


def _json_array(path: Path) -> Iterator[tuple[str, Any]]:
    """Read an array of rows, or JSON Lines, which often use the suffix ``.json`` too."""
    try:
        value = _parse_json(path.read_bytes())
    except DataError as error:
        if getattr(error.__cause__, "msg", None) != "Extra data":
            raise DataError(f"{path}: {error}") from error
        yield from _json_lines(path)
        return
    yield from _number(path, value if isinstance(value, list) else [value])


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig")) if data.strip() else []
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise DataError(f"not JSON: {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise DataError("JSON is nested too deeply") from error
    except ValueError as error:
        raise DataError("JSON has a number with too many digits") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Read each cell as text without conversion, because a number or "NA" can be an answer."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
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
            if not columns:
                columns = [cell.strip() for cell in cells]
                _check_header(path, columns)
            elif cells:
                yield origin, _table_row(columns, cells)


def _check_header(path: Path, columns: list[str]) -> None:
    line = ",".join(columns)
    try:
        line.encode()
    except UnicodeEncodeError:
        raise DataError(f"{path} is not UTF-8") from None
    if len(columns) == 1 and (";" in line or "\t" in line):
        raise DataError(f"{path}: the cells of the header must be separated by commas")


def _table_row(columns: list[str], cells: list[str]) -> dict[str, str] | DataError:
    if len(cells) != len(columns):
        return DataError(f"has {len(cells)} cells, but the header has {len(columns)}")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return DataError("not UTF-8")
    return dict(zip(columns, cells, strict=True))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    return _number(path, _stream("parquet", path, data_files=glob.escape(str(path))))


def _stream(reader: str, source: Path | str, **options: str) -> Iterable[Any]:
    """Stream rows with ``datasets``, so that the library's cache keeps no copy of private text."""
    from datasets import load_dataset

    try:
        yield from load_dataset(reader, split="train", streaming=True, **options)
    except Exception as error:  # Third-party readers can raise any exception.
        raise DataError(f"{source} can't be read", str(error)) from error
