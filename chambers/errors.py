"""What a command says when it can't do what it was asked for."""


class CommandError(Exception):
    """The message is for the person at the terminal: what is wrong, where, and what to do."""
