"""The error of work that a deadline has ended."""


class DeadlineError(TimeoutError):
    """A message's time was over before its work was done."""
