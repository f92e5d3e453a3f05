"""Traffic of lanes, and its cost."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Traffic:
    """Traffic of a lane and its cost at this end; sums are of several lanes.

    Attributes:
        bytes_up: Bytes from the client to the server, with the handshake and all overhead above TCP
            except gRPC's opening and closing headers.
        bytes_down: Bytes from the server to the client.
        seconds_crypto: Time spent on encryption and decryption.
        seconds_serialisation: Time spent on packing and unpacking tensors.
        seconds_waiting: Time spent in ``receive``.

    """

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_crypto: float = 0.0
    seconds_serialisation: float = 0.0
    seconds_waiting: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
