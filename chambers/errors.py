"""Errors and signals that end a command."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from finetuning.errors import UserError

if TYPE_CHECKING:
    from pydantic import ValidationError

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class CommandError(UserError):
    """A command can't be carried out."""


def read_bytes(file: Path) -> bytes:
    """Read a file; raise ``CommandError`` with its name and the reason if it can't be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise CommandError(f"{file} can't be read: {error.strerror}") from error


def describe_error(error: OSError) -> str:
    """Describe an error by its file, if known, and the system's message, or its text or type."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def undecodable_input(error: UnicodeDecodeError) -> CommandError:
    """Return the error of standard input that isn't text in the encoding of the terminal."""
    return CommandError(
        f"standard input is not {error.encoding}: {error.reason} at byte {error.start + 1}"
    )


def first_problem(error: "ValidationError") -> str:
    """Return where a file's first problem is, and what it is, without the value."""
    problem = error.errors(include_input=False, include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))


def interrupt_at_end() -> None:
    """Raise ``KeyboardInterrupt`` on SIGTERM and SIGHUP too, unless the signal is ignored."""
    for each in END_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.default_int_handler)
