"""gRPC as lanes use it: the one method, and the options of channels and servers."""

import ipaddress

import grpc

from split.protocol.errors import LaneCutError, LaneDeadlineError, LaneError, Refusal, refused
from split.protocol.records import LONGEST_RECORD

SERVICE = "chambers.Lane"
METHOD = "Open"
_REFUSED = "chambers: "
# Before this it is not known who is at the other end.
HANDSHAKE_SECONDS = 10.0
# An honest client's preface, stream and first message come one right after another.
SILENT_SECONDS = 3.0
# How long a lane that was closed may take to send what is left, and to hear the same.
CLOSE_SECONDS = 5.0
# 1 Gbit/s with 20 ms each way has 5 MB on its way; gRPC's own 64 KiB would have 0.1% of the line.
_WINDOW_BYTES = 8 * 2**20
_HTTP2_FRAME_BYTES = 2**14
_SPARE_CONNECTIONS = 256  # beyond one for every call
_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", LONGEST_RECORD),
    ("grpc.max_send_message_length", LONGEST_RECORD),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would shrink the window again
    ("grpc.max_metadata_size", 4096),
    ("grpc.per_message_compression", 0),  # ciphertext has nothing to compress
    # A peer that went away without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(address: str) -> list[tuple[str, int]]:
    """Give a client's options: every lane has a connection of its own."""
    options = [*_COMMON, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if _is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def server_options(calls: int) -> list[tuple[str, int]]:
    """Give the server's options; a port in use is an error, not a share of its connections.

    Args:
        calls: how many there may be at once.

    """
    silent = int(SILENT_SECONDS * 1000)
    return [
        *_COMMON,
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Connections without a stream are anybody's too; each takes memory and a file descriptor.
        ("grpc.max_allowed_incoming_connections", calls + _SPARE_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", silent),
        ("grpc.max_connection_idle_ms", silent),
    ]


def wire_bytes(message: bytes) -> int:
    """Give what a gRPC message takes on the wire, above TCP: its frame's and HTTP/2's headers."""
    size = len(message) + 5
    return size + 9 * -(-size // _HTTP2_FRAME_BYTES)


def refusal_details(refusal: Refusal) -> str:
    """Give the words of a status that refuses a handshake; anybody may read them."""
    return f"{_REFUSED}{refusal.value}"


def stream_error(error: Exception, answered: bool) -> LaneError:
    """Say in a lane's terms why its stream broke.

    Args:
        error: as gRPC raised it.
        answered: whether the server has proved who it is: from then on what it has to say comes
            encrypted, and a status could be anybody's.

    """
    code = error.code() if isinstance(error, grpc.Call) else None
    details = (error.details() or "") if isinstance(error, grpc.Call) else ""
    if not answered and details.startswith(_REFUSED):
        value = details.removeprefix(_REFUSED)
        if value in list(Refusal):
            return refused(Refusal(value))
    if not answered and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return refused(Refusal.BUSY)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LaneDeadlineError("the lane's time is over (round-timeout)")
    reason = f" ({code.name})" if code is not None else ""
    return LaneCutError(f"the stream broke{reason}")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
