"""The root of the errors that a user can correct."""


class UserError(Exception):
    """A problem that a user can correct; the message says what is wrong, where, and what to do."""

    @property
    def public(self) -> str:
        """The text that may leave an institution: it quotes no row."""
        return str(self)
