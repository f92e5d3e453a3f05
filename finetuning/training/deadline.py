"""The error of work that a deadline has ended."""

from finetuning.errors import UserError


class DeadlineError(UserError, TimeoutError):
    """A message's time was over before its work was done."""
