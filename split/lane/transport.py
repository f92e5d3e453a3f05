"""How lanes use gRPC: the method, options of channels and servers, and status codes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from split.address import is_loopback
from split.protocol.errors import FrameError, LaneCutError, LaneError
from split.protocol.records import MAX_RECORD_BYTES

SERVICE = "chambers.Lane"
METHOD = "Open"
REFUSED = "chambers: "  # precedes a ``Refusal`` in the details of a status, not encrypted
# Time limit for a handshake, during which the peer is not authenticated.
HANDSHAKE_SECONDS = 10.0
# Time limit for a closed lane to send the remaining frames and to receive those of the other side.
CLOSE_SECONDS = 5.0
MAX_STREAMS = 1000  # maximum number of streams of a lane, to limit its handshakes
# At 1 Gbit/s with 20 ms each way, 5 MB are in flight; gRPC's default window is only 64 KiB.
_WINDOW_BYTES = 8 * 2**20
_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_RECORD_BYTES),
    ("grpc.max_send_message_length", MAX_RECORD_BYTES),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # the probe would reduce the window again
    ("grpc.max_metadata_size", 4096),
    # Disable compression in both directions: ciphertext is incompressible, and decompressing data
    # from unauthenticated peers would be a risk.
    ("grpc.per_message_compression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Detect within a minute that a peer has disappeared.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclass(frozen=True)
class PeerLimits:
    """A server's limits on streams and connections, which anyone can open."""

    handshake_seconds: float = HANDSHAKE_SECONDS  # limit for a handshake after its first message
    silent_seconds: float = 3.0  # limit for the first message, which clients send at once
    half_open: int = 32  # maximum number of silent streams, and of unfinished handshakes
    of_one_identity: int = 4  # maximum number of unfinished handshakes per identity
    lanes_of_one_identity: int = 16  # maximum number of lanes, including ended ones that still work
    spare_connections: int = 256  # maximum number of connections, in addition to one per call
    max_streams: int = MAX_STREAMS  # maximum number of streams of a lane


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return the options of a client's channel. Each stream has its own connection."""
    options = [*_COMMON, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def server_options(calls: int, peers: PeerLimits) -> list[tuple[str, int]]:
    """Return the options of a server with at most ``calls`` concurrent calls.

    The port is not shared, so a server can't start on a port that is in use.
    """
    silent = int(peers.silent_seconds * 1000)
    return [
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Limit unauthenticated connections without a stream, which use memory and file descriptors.
        ("grpc.max_allowed_incoming_connections", calls + peers.spare_connections),
        ("grpc.server_handshake_timeout_ms", silent),
        ("grpc.max_connection_idle_ms", silent),
    ]


def lane_error(error: Exception) -> LaneError:
    """Convert an exception that a stream raised into an error of the lane."""
    if isinstance(error, LaneError):
        return error
    if isinstance(error, grpc.RpcError):
        # After the handshake, errors are sent in encrypted frames, so a gRPC error is a cut.
        code, _ = status_of(error)
        return LaneCutError(f"the stream broke ({code.name})" if code else "the stream broke")
    # Omit the message, because it may contain confidential data.
    return FrameError(type(error).__name__)


def status_of(error: Exception) -> tuple[grpc.StatusCode | None, str]:
    """Return the code and the details of a stream's status; None and "" if there is no status."""
    if isinstance(error, grpc.Call):
        return error.code(), error.details() or ""
    return None, ""


@contextmanager
def time_limit(seconds: float, end: Callable[[], object]) -> Iterator[threading.Timer]:
    """Call ``end`` in another thread if the ``with`` block takes longer than ``seconds``."""
    limit = threading.Timer(seconds, end)
    limit.daemon = True
    limit.start()
    try:
        yield limit
    finally:
        limit.cancel()
