"""One gRPC stream of docs/wire.md, implemented from that page."""

import queue
import threading
import time

import grpc

_OPTIONS = [
    # One stream per connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 1_048_624),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class CutError(Exception):
    """The stream ended.

    Attributes:
        busy: Whether the server had no room for a handshake.

    """

    def __init__(self, reason: str, busy: bool = False) -> None:
        super().__init__(reason)
        self.busy = busy


class Stream:
    """Messages in both directions over a separate connection.

    Args:
        address: Host and port.
        deadline: Deadline of the lane, on ``time.monotonic``'s clock.

    """

    def __init__(self, address: str, deadline: float) -> None:
        self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._up: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._down: queue.SimpleQueue[bytes | CutError] = queue.SimpleQueue()
        method = self._channel.stream_stream("/chambers.Lane/Open", None, None)
        self._call = method(iter(self._up.get, None), timeout=deadline - time.monotonic())
        threading.Thread(target=self._read, name="wire-read", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Queue a message; if the stream has ended, only ``receive`` raises an error."""
        self._up.put(message)

    def receive(self, timeout: float) -> bytes:
        """Return the next message.

        Raises:
            CutError: The stream has ended.
            TimeoutError: No message arrived in time.

        """
        try:
            message = self._down.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {timeout:g} s") from None
        if isinstance(message, CutError):
            self._down.put(message)
            raise message
        return message

    def close(self) -> None:
        """Cancel the stream without sending a message."""
        self._up.put(None)
        self._call.cancel()
        self._channel.close()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._down.put(message)
            self._down.put(CutError("the server ended the stream"))
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            busy = details == "chambers: busy" or code is grpc.StatusCode.CANCELLED
            self._down.put(CutError(f"{code.name}: {details}", busy))
