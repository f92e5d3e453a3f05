"""Invitations: everything that a client needs to open a lane."""

from dataclasses import dataclass

from split.protocol.tickets import Identity, Ticket


@dataclass(frozen=True)
class Invitation:
    """Everything that a client needs to open a lane. Keep it confidential.

    Attributes:
        address: Address of the block server, as host:port.
        suite: Suite of the key exchange.
        server_key: The server's current public key.
        identity: Run, round and client that the lane is for.
        ticket: Ticket with which the client opens the lane.

    """

    address: str
    suite: str
    server_key: bytes
    identity: Identity
    ticket: Ticket
