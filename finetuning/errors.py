"""The base class of errors that a user can correct."""


class UserError(Exception):
    """An error that a user can correct; the message gives problem, location and remedy."""

    @property
    def public(self) -> str:
        """The message that may leave an institution; it quotes no row."""
        return str(self)
