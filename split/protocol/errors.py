"""The errors of a lane, and how a peer's words are shown.

No message of these errors holds a key, a secret or a number of a hidden state, so that all of them
may be logged and shown.
"""

from enum import StrEnum

from finetuning.errors import UserError


class LaneError(UserError, RuntimeError):
    """A lane could not be opened, or has ended."""


class LaneClosedError(LaneError):
    """Either side has closed the lane in order."""


class LaneCutError(LaneError):
    """A stream ended before the other side had closed the lane, and could not be replaced."""


class LaneUnreachableError(LaneError):
    """No block server could be reached at the address, or it ended the handshake."""


class LaneTimeoutError(LaneError, TimeoutError):
    """A wait was too long. After ``receive`` the lane still lives; the caller may wait again."""


class LaneDeadlineError(LaneError):
    """The lane's deadline has passed."""


class LaneBacklogError(LaneError):
    """The other side doesn't read what it is sent."""


class FrameError(LaneError):
    """A frame that was received, or is to be sent, is not one that the lane allows."""


class AlteredRecordError(FrameError):
    """A record isn't the next one that the other end has encrypted; the stream is cut."""


class PeerError(LaneError):
    """The other side ended the lane and said why."""


class ProtocolError(RuntimeError):
    """The client sent something that it may not send now; its lane ends."""


class Refusal(StrEnum):
    """Why a handshake failed: the short codes that go over the network in the clear."""

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
    Refusal.MALFORMED: "a handshake message is malformed: is something else at this address?",
    Refusal.VERSION: "the two sides speak different versions of the lane protocol",
    Refusal.SUITE: "the two sides have different settings of split.key-exchange",
    Refusal.AUTHENTICATION: "a handshake message was altered, or made without the ticket's secret",
    Refusal.TICKET_UNKNOWN: "the server has not issued this ticket: has it been restarted?",
    Refusal.TICKET_EXPIRED: "the ticket has expired: its round took too long to begin",
    Refusal.TICKET_USED: "the ticket has been used: every ticket opens one lane",
    Refusal.TICKET_FOREIGN: "the ticket was issued for another run, round or node",
    Refusal.SERVER_KEY: "the server's key has changed since this ticket was issued",
    Refusal.WRAPPED_SECRET: "the secret wrapped to the server's key can't be opened",
    Refusal.BUSY: "the server has as many lanes, or handshakes in progress, as it allows",
}


class HandshakeError(LaneError):
    """The two sides could not agree on a lane.

    Attributes:
        refusal: The reason; nothing else about the error crosses the network.

    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(_WORDS[refusal])
        self.refusal = refusal


class TicketError(HandshakeError):
    """The ticket is unknown, expired, used, or was issued to another client."""


class ServerKeyError(HandshakeError):
    """The client has the key of an earlier period, or of another server."""


class LaneBusyError(HandshakeError):
    """The server has no room at the moment; the ticket is still good."""


_CLASSES: dict[Refusal, type[HandshakeError]] = {
    Refusal.TICKET_UNKNOWN: TicketError,
    Refusal.TICKET_EXPIRED: TicketError,
    Refusal.TICKET_USED: TicketError,
    Refusal.TICKET_FOREIGN: TicketError,
    Refusal.SERVER_KEY: ServerKeyError,
    Refusal.BUSY: LaneBusyError,
}


def refused(refusal: Refusal) -> HandshakeError:
    """Return the error that belongs to a refusal."""
    return _CLASSES.get(refusal, HandshakeError)(refusal)


def printable(text: str, most: int = 1000) -> str:
    """Return a peer's text as one line that may be logged, stored and shown.

    Everything that ``str.isprintable`` excludes becomes its escape: line breaks, control characters
    and terminal escapes, bidirectional controls, lone surrogates. Letters of all languages stay.

    Args:
        text: Text from a peer.
        most: Maximum number of characters; a longer text is shortened.

    """
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1]
    )
    return shown if len(shown) <= most else shown[: most - 1] + "…"
