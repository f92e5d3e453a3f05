"""The numbers of training rows that the coordinator has agreed on with institutions.

In averages, an institution counts with at most this number (docs/security.md). The numbers are in
a file on the coordinator's machine, which ``chambers site admit`` writes.
"""

from codecs import BOM_UTF8
from pathlib import Path

import platformdirs
from flwr.serverapp import Grid
from pydantic import PositiveInt, TypeAdapter, ValidationError

from federation.flower_internals import HttpGrid
from federation.run_config import ConfigError
from finetuning.files import write_json

_ROWS = TypeAdapter(dict[str, PositiveInt])


def agreed_rows_of(grid: Grid) -> dict[str, int] | None:
    """Return a deployment's agreed numbers by name, or None in a simulation, which has no file.

    Raise ``ConfigError`` if the file can't be read.
    """
    return read_agreed_rows() if isinstance(grid, HttpGrid) else None


def read_agreed_rows() -> dict[str, int]:
    """Return the agreed numbers by the institution's name; empty if there is no file.

    Raise ``ConfigError`` if the file can't be read.
    """
    file = _file()
    try:
        return _ROWS.validate_json(file.read_bytes().removeprefix(BOM_UTF8), strict=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"{file} can't be read: it must contain each institution's number of rows, such as "
            f'{{"court": 1200}}. Correct it, or delete it and repeat the agreements with chambers '
            f"site admit: {error}"
        ) from error


def agree_on_rows(name: str, rows: int | None) -> None:
    """Write the number of rows agreed on with an institution; None withdraws the agreement.

    Raise ``ConfigError`` if the file can't be read, or ``OSError`` if it can't be written.
    """
    before = read_agreed_rows()
    after = {key: value for key, value in before.items() if key != name}
    if rows is not None:
        after[name] = rows
    if after != before:
        write_json(_file(), dict(sorted(after.items())))


def _file() -> Path:
    return platformdirs.user_data_path("chambers") / "agreed-rows.json"
