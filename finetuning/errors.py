"""Errors that a user can correct."""


class UserError(Exception):
    """An error that a user can correct; the message states the problem, location and remedy."""

    @property
    def public(self) -> str:
        """The message in a form that may be sent outside an institution; it quotes no row."""
        return str(self)


class DeadlineError(UserError, TimeoutError):
    """The time limit of a message expired before the requested work was done."""
