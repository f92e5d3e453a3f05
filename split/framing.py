"""Messages over a socket: the length of the content (8 bytes, big-endian) and the content."""

import socket
import struct

_LENGTH = struct.Struct(">Q")


def send(connection: socket.socket, content: bytes) -> None:
    """Send a message; raise ``OSError`` if the other end has closed, or has stopped reading."""
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket, max_bytes: int = 2**63 - 1) -> bytearray:
    """Receive a message; raise ``OSError`` if it exceeds ``max_bytes``, or is incomplete."""
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > max_bytes:
        raise OSError(f"a frame has {size} bytes, but at most {max_bytes} are allowed")
    return _receive_exactly(connection, size)


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        rest = rest[count:]
    return content
