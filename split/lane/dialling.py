"""Lanes as their users know them, and how a client opens one."""

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import grpc

from split.lane.lane import Lane
from split.lane.transport import (
    HANDSHAKE_SECONDS,
    METHOD,
    SERVICE,
    channel_options,
    stream_error,
    wire_bytes,
)
from split.protocol.errors import (
    HandshakeError,
    LaneCutError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    Refusal,
    refused,
)
from split.protocol.frames import Limits
from split.protocol.handshake import ClientHandshake
from split.protocol.keys import known_suite
from split.protocol.tickets import Identity, Ticket


def connect(
    address: str,
    ticket: Ticket,
    identity: Identity,
    server_public: bytes,
    suite: str,
    limits: Limits,
    deadline: float,
) -> Lane:
    """Open a lane to the block server.

    The ticket is spent when the server has the last message of the handshake. If another lane was
    quicker with it, that shows in the lane's first ``receive``, as a ``TicketError``.

    Args:
        address: the server's, as host:port.
        ticket: good for this lane.
        identity: what it was issued for.
        server_public: the server's key of this period.
        suite: its kind, as in ``split.key-exchange``.
        limits: what the server may send.
        deadline: of the lane, on ``time.monotonic``'s clock: it ends then, whatever is under way.

    Raises:
        HandshakeError: the two sides could not agree; its subclasses say more.
        LaneTimeoutError: the server did not answer in time.
        LaneCutError: there is no server at this address, or it went away.

    """
    handshake = ClientHandshake(ticket, identity, server_public, known_suite(suite))
    hello = handshake.hello()
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise LaneTimeoutError("the lane's time is over before it was opened")
    channel = grpc.insecure_channel(address, options=channel_options(address))
    opening = _Opening(hello)
    method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    call = method(opening.messages(), timeout=remaining)

    def release() -> None:
        opening.give_up()
        call.cancel()
        channel.close()

    limit = threading.Timer(min(HANDSHAKE_SECONDS, remaining), call.cancel)
    limit.daemon = True
    limit.start()
    try:
        answer = next(call)
        finished, secrets = handshake.finish(answer)
    except StopIteration:
        release()
        raise refused(Refusal.MALFORMED) from None
    except grpc.RpcError as error:
        release()
        # Without gRPC's words in between: they are long and name no knob.
        raise _connect_error(error, address, limit.is_alive()) from None
    except BaseException:
        release()
        raise
    finally:
        limit.cancel()
    carried = (wire_bytes(hello) + wire_bytes(finished), wire_bytes(answer))
    lane = Lane(identity, secrets, limits, True, carried, release)
    opening.proceed(finished, lane)
    lane.start(call)
    return lane


class _Opening:
    """What the client sends: M1, later M3, and then the lane's records."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._rest: SimpleQueue[tuple[bytes, Lane] | None] = SimpleQueue()

    def proceed(self, finished: bytes, lane: Lane) -> None:
        """Let M3 and the lane follow."""
        self._rest.put((finished, lane))

    def give_up(self) -> None:
        """Let nothing follow."""
        self._rest.put(None)

    def messages(self) -> Iterator[bytes]:
        """Give the messages, in the thread in which gRPC asks for them."""
        yield self._hello
        rest = self._rest.get()
        if rest is not None:
            finished, lane = rest
            yield finished
            yield from lane.messages()


def _connect_error(error: grpc.RpcError, address: str, in_time: bool) -> LaneError:
    found = stream_error(error, answered=False)
    if isinstance(found, HandshakeError):
        return found
    if not in_time or isinstance(found, LaneDeadlineError):
        return LaneTimeoutError(f"the block server at {address} did not answer")
    if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED:
        # By the server: the stream was too slow, or has lost its place to another one.
        return refused(Refusal.BUSY)
    return LaneCutError(
        f"the block server at {address} can't be reached, or ended the handshake: {found}; clients "
        "reach it at split.advertise, or where it listens if that is empty"
    )
