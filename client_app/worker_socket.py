"""The protocol of the Unix socket between a ClientApp process and the resident worker.

The caller sends the digest of its code. The worker answers with an empty frame or, if it refuses,
with the reason. The caller then sends Flower's Message and Context, and the worker answers with
two frames: the name of an exception (or an empty frame), and the reply. A frame consists of the
content's length (8 bytes, big-endian) and the content (text or protobuf). Nothing is pickled.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from split import framing

# Largest message that protobuf can serialise; also the limit for a frame.
MAX_BYTES = 2**31 - 1
MAX_TEXT = 1000
# Timeout, in seconds, for connecting, sending a frame, and reading the next bytes of a frame.
TRANSFER_SECONDS = 30.0
_CREDENTIALS = struct.Struct("3i")


class WorkerError(Exception):
    """The worker can't answer a message; the text completes a sentence that begins "the worker"."""


def refuse_open_folder(path: Path) -> None:
    """Raise ``WorkerError`` if a socket's folder is writable by every user, or doesn't exist."""
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise WorkerError(f"has no folder for its socket: {error}") from error
    if mode & stat.S_IWOTH:
        raise WorkerError(
            f"must have its socket in a private folder: every user can write to {path.parent}"
        )


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as reported by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


@contextmanager
def connected_worker(path: Path) -> Iterator[socket.socket]:
    """Connect to the worker at a path, or raise ``WorkerError`` if it is missing or not trusted.

    The worker must run as this user, the folder's owner, or root: other users with write access to
    the folder could create their own socket there.
    """
    refuse_open_folder(path)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TRANSFER_SECONDS)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise WorkerError(f"is not running ({error.strerror})") from error
        except OSError as error:
            raise WorkerError(f"can't be reached: {error}") from error
        uid = peer_uid(connection)
        if uid not in {os.getuid(), path.parent.stat().st_uid, 0}:
            raise WorkerError(f"is a process of user {uid}, who doesn't own {path.parent}")
        yield connection


send_frame = framing.send


def receive_frame(connection: socket.socket, max_bytes: int = MAX_BYTES) -> bytearray:
    """Receive a frame; see `split.framing.receive`."""
    return framing.receive(connection, max_bytes)
