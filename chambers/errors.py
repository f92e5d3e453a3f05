"""Errors that end a command."""

from finetuning.errors import UserError


class CommandError(UserError):
    """A command can't be carried out."""


def described(error: OSError) -> str:
    """Return the file and the reason of an error, or the text of the error if it has no reason."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason
