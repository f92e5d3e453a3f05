"""Errors that a user can correct, and escaping of text from others."""


class UserError(Exception):
    """An error that a user can correct; the message states the problem, location and remedy."""

    @property
    def public(self) -> str:
        """The message in a form that may be sent outside an institution; it quotes no row."""
        return str(self)


class DeadlineError(UserError, TimeoutError):
    """The time limit of a message expired before the requested work was done."""


class BaseModelError(UserError, ValueError):
    """The base model cannot be found or used; the message states the reason and the remedy."""


def printable(text: str, max_length: int = 1000) -> str:
    """Return text from a peer as a single line that can be logged, stored and displayed.

    Replace characters that are not printable according to ``str.isprintable`` (line breaks, control
    characters, terminal escapes, bidirectional controls, lone surrogates) with escape sequences.
    Letters of all languages are unchanged. The result has at most ``max_length`` characters.
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text[: max_length + 1]
    )
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
