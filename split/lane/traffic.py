"""Statistics of the traffic of lanes."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Traffic:
    """Traffic and processing time of one lane, or of several lanes in total, at this end.

    Attributes:
        bytes_up: Bytes from the client to the server, including the handshake and all overhead
            above TCP except the initial headers and the trailers of gRPC.
        bytes_down: Bytes from the server to the client.
        seconds_crypto: Time spent on encryption and decryption.
        seconds_serialisation: Time spent on serialising and deserialising tensors.
        seconds_waiting: Time spent in ``receive``.

    """

    bytes_up: int = 0
    bytes_down: int = 0
    seconds_crypto: float = 0.0
    seconds_serialisation: float = 0.0
    seconds_waiting: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
