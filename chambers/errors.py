"""The error that a command ends with when it can't do what was asked."""


class CommandError(Exception):
    """A problem the user can solve; the message says what is wrong, where, and what to do."""
