"""The error for work that missed its deadline."""

from finetuning.errors import UserError


class DeadlineError(UserError, TimeoutError):
    """The time limit of a message expired before the requested work was done."""
