"""Invitations: everything that a client needs to open a lane."""

from dataclasses import dataclass

from split.protocol.tickets import Identity, Ticket


@dataclass(frozen=True)
class Invitation:
    """The confidential data that a client needs to open a lane."""

    address: str  # address of the block server, as host:port
    suite: str  # suite of the key exchange
    server_key: bytes  # the server's current public key
    identity: Identity
    ticket: Ticket
