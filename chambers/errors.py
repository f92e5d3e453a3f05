"""The error that ends a command which can't be carried out."""


class CommandError(Exception):
    """A problem the user can solve; the message says what is wrong, where, and what to do."""
