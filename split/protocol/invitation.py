"""Invitations: everything that a client needs to open a lane."""

from dataclasses import dataclass

from split.protocol.tickets import Identity, Ticket


@dataclass(frozen=True)
class Invitation:
    """Everything that a client needs to open a lane; it must reach nobody else.

    Attributes:
        address: Address of the block server, as host:port.
        suite: Suite of the key exchange.
        server_key: The server's public key of this period.
        identity: Run, round and client that the lane is for.
        ticket: Ticket for one lane.

    """

    address: str
    suite: str
    server_key: bytes
    identity: Identity
    ticket: Ticket
