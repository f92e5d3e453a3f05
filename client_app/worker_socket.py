"""The Unix socket between a message's process and the resident worker, as both ends use it.

A caller sends the digest of its code. The worker answers with an empty frame, or with the reason
why it refuses. Then the caller sends Flower's Message and Context, and the worker answers with two
frames: the name of an exception, or nothing, and the reply. A frame is its length in 8 bytes,
big-endian, and as many bytes of text or of protobuf. Nothing is pickled.
"""

import hashlib
import os
import socket
import stat
import struct
from pathlib import Path

import client_app
import finetuning
import split
import strategies

# The largest message that protobuf can serialise; also the limit of a frame.
MOST_BYTES = 2**31 - 1
MOST_TEXT = 1000
# Seconds in which the other end must accept a connection, and continue a frame.
TRANSFER_SECONDS = 30.0
_LENGTH = struct.Struct(">Q")
_CREDENTIALS = struct.Struct("3i")


class WorkerError(Exception):
    """The worker can't answer a message; the text completes "the worker …"."""


def code_digest() -> str:
    """Return the SHA-256 digest of the files that answer messages: code, and data beside it.

    It is the same for a checkout, an installed package and the app as Flower installs it.
    """
    state = hashlib.sha256()
    for package in (client_app, finetuning, split, strategies):
        root = Path(str(package.__file__)).parent
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                name = f"{root.name}/{file.relative_to(root).as_posix()}"
                state.update(f"{name}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()


def refuse_open_folder(path: Path) -> None:
    """Check that not every user can put another socket at a path.

    Raises:
        WorkerError: Every user can, or the folder doesn't exist.

    """
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise WorkerError(f"has no folder: {error}") from error
    if mode & stat.S_IWOTH:
        raise WorkerError(
            f"must have its socket in a folder of its own: every user can write to {path.parent}"
        )


def peer_uid(connection: socket.socket) -> int:
    """Return the id of the user whose process is at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def refuse_stranger(connection: socket.socket, path: Path) -> None:
    """Check that the process at the other end is of this user, of the folder's owner, or of root.

    Others who may write to the folder could put a socket of their own there.

    Raises:
        WorkerError: It is another user's.

    """
    uid = peer_uid(connection)
    if uid not in {os.getuid(), path.parent.stat().st_uid, 0}:
        raise WorkerError(f"is a process of user {uid}, to whom {path.parent} doesn't belong")


def send(connection: socket.socket, content: bytes) -> None:
    """Send a frame.

    Raises:
        OSError: The other end has closed the connection, or doesn't read.

    """
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket, most: int = MOST_BYTES) -> bytes:
    """Receive a frame of at most ``most`` bytes.

    Raises:
        OSError: The frame is longer, or it didn't arrive completely.

    """
    (size,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if size > most:
        raise OSError(f"a frame of {size} bytes, and at most {most} were expected")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if count == 0:
            raise ConnectionResetError("the other end has closed the connection")
        rest = rest[count:]
    return bytes(content)
