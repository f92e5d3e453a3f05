"""gRPC as lanes use it: the one method, and the options of channels and servers."""

import ipaddress

import grpc

from split.protocol.errors import LaneCutError, LaneError, Refusal
from split.protocol.records import MAX_RECORD_BYTES

SERVICE = "chambers.Lane"
METHOD = "Open"
_REFUSED = "chambers: "
# A stream that has not been confirmed by then may be anybody's.
HANDSHAKE_SECONDS = 10.0
# An honest client's preface, stream and first message come one right after another.
SILENT_SECONDS = 3.0
# How long a lane that was closed may take to send what is left, and to receive the same.
CLOSE_SECONDS = 5.0
# 1 Gbit/s with 20 ms each way has 5 MB on its way; gRPC's own 64 KiB would have 0.1% of the line.
_WINDOW_BYTES = 8 * 2**20
_SPARE_CONNECTIONS = 256  # beyond one for every call
_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_RECORD_BYTES),
    ("grpc.max_send_message_length", MAX_RECORD_BYTES),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would shrink the window again
    ("grpc.max_metadata_size", 4096),
    # Ciphertext can't be compressed, and what an outsider has compressed must not be expanded:
    # accept no algorithm but identity, in either direction.
    ("grpc.per_message_compression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A peer that went away without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return a client's options; every stream has a connection of its own."""
    options = [*_COMMON, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if _is_loopback(address):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def server_options(calls: int) -> list[tuple[str, int]]:
    """Return the server's options; a port in use is an error, not a share of its connections.

    Args:
        calls: How many there may be at once.

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


def refusal_details(refusal: Refusal) -> str:
    """Return the details of a status that refuses a handshake; anybody may read them."""
    return f"{_REFUSED}{refusal.value}"


def refusal_of(error: grpc.RpcError) -> Refusal | None:
    """Return the reason that a handshake was refused for, if that is what the status says.

    A status isn't authentic: anybody on the way may have sent it.
    """
    code, details = status_of(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Refusal.BUSY
    value = details.removeprefix(_REFUSED)
    return Refusal(value) if value != details and value in list(Refusal) else None


def stream_error(error: Exception) -> LaneError:
    """Return what the end of a stream means to its lane: whatever the status, a cut.

    After the handshake both sides say encrypted what they have to say.
    """
    code, _ = status_of(error)
    return LaneCutError(f"the stream broke ({code.name})" if code else "the stream broke")


def status_of(error: Exception) -> tuple[grpc.StatusCode | None, str]:
    """Return the code and the details of a stream's status, if there is one."""
    if isinstance(error, grpc.Call):
        return error.code(), error.details() or ""
    return None, ""


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
