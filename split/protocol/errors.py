"""Errors of a lane, and escaping of text from a peer.

The errors contain no keys, secrets or values of hidden states, so they can be logged and displayed.
"""

from enum import StrEnum

from finetuning.errors import UserError


class LaneError(UserError, RuntimeError):
    """A lane could not be opened, or has ended."""


class LaneClosedError(LaneError):
    """Either side has closed the lane normally."""


class LaneCutError(LaneError):
    """A stream ended before the lane was closed, and could not be replaced."""


class LaneUnreachableError(LaneError):
    """No block server could be reached at the address, or the server ended the handshake."""


class LaneTimeoutError(LaneError, TimeoutError):
    """A wait timed out. After a timeout in ``Lane.receive``, the lane is still open."""


class LaneDeadlineError(LaneError):
    """The lane's deadline has passed."""


class LaneBacklogError(LaneError):
    """The other side does not read the frames that are sent to it."""


class FrameError(LaneError):
    """A received or outgoing frame is not allowed on the lane."""


class AlteredRecordError(FrameError):
    """A record is not the next one that the other side encrypted; the lane treats this as a cut."""


class PeerError(LaneError):
    """The other side ended the lane with an error message."""


class ProtocolError(RuntimeError):
    """The client sent a frame that is not allowed; the server ends the client's lane."""


class Refusal(StrEnum):
    """Why a handshake failed: short codes that are sent over the network unencrypted."""

    MALFORMED = "malformed"
    VERSION = "version"
    SUITE = "suite"
    AUTHENTICATION = "authentication"
    TICKET_UNKNOWN = "ticket-unknown"
    TICKET_EXPIRED = "ticket-expired"
    TICKET_USED = "ticket-used"
    TICKET_FOREIGN = "ticket-foreign"
    SERVER_KEY = "server-key"
    WRAPPED_SECRET = "wrapped-secret"
    BUSY = "busy"


_WORDS = {
    Refusal.MALFORMED: "a handshake message is malformed: is a different program at this address?",
    Refusal.VERSION: "the two sides use different versions of the lane protocol",
    Refusal.SUITE: "the two sides have different values of split.key-exchange",
    Refusal.AUTHENTICATION: "a handshake message was altered, or made without the ticket's secret",
    Refusal.TICKET_UNKNOWN: "the server has not issued this ticket: has it been restarted?",
    Refusal.TICKET_EXPIRED: "the ticket has expired: the time to open or resume its lane is over",
    Refusal.TICKET_USED: "the ticket has been used: it could open only one lane",
    Refusal.TICKET_FOREIGN: "the ticket was issued for a different run, round or node",
    Refusal.SERVER_KEY: "the server's key has changed since this ticket was issued",
    Refusal.WRAPPED_SECRET: "the secret encrypted to the server's key can't be decrypted",
    Refusal.BUSY: "the server accepts no more lanes or handshakes at the moment",
}


class HandshakeError(LaneError):
    """The handshake failed. Only ``refusal``, the reason, is sent over the network."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(_WORDS[refusal])
        self.refusal = refusal


def printable(text: str, max_length: int = 1000) -> str:
    """Return text from a peer as a single line that can be logged, stored and displayed.

    Replace characters that are not printable according to ``str.isprintable`` (line breaks, control
    characters, terminal escapes, bidirectional controls, lone surrogates) with escape sequences.
    Letters of all languages are unchanged. The result is truncated to ``max_length`` characters.
    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in text[: max_length + 1]
    )
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
