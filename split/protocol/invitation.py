"""What a client needs to open a lane."""

from dataclasses import dataclass

from split.protocol.tickets import Identity, Ticket


@dataclass(frozen=True)
class Invitation:
    """What a client needs to open a lane; it must reach nobody else.

    Attributes:
        address: of the block server, as host:port.
        suite: of the key exchange.
        server_key: the server's public key of this period.
        identity: which run, round and client the lane is for.
        ticket: good for one lane.

    """

    address: str
    suite: str
    server_key: bytes
    identity: Identity
    ticket: Ticket
