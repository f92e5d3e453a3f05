"""Open a lane and its streams at the client: one attempt, and the one retry policy."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import grpc

from split.lane.lane import Lane
from split.lane.stream import Outbox, Stream, wire_bytes
from split.lane.transport import (
    HANDSHAKE_SECONDS,
    METHOD,
    SERVICE,
    channel_options,
    refusal_of,
)
from split.protocol.errors import (
    LaneBusyError,
    LaneCutError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    LaneUnreachableError,
    Refusal,
    refused,
)
from split.protocol.frames import Limits
from split.protocol.handshake import ClientHandshake
from split.protocol.invitation import Invitation
from split.protocol.keys import known_suite

_LOG = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 15.0


def open_lane(
    invitation: Invitation,
    limits: Limits,
    deadline: float,
    resume_timeout: float,
    patience: float = PATIENCE_SECONDS,
    busy_until: float | None = None,
) -> Lane:
    """Open a lane to the block server, and keep it open in a thread of its own.

    Until the server has confirmed the handshake nothing that comes back is authentic: whatever ends
    an attempt, the ticket stays good and is tried again. A server without room is asked until
    ``busy_until``; any other refusal, or silence, is final when it lasts for ``patience``. After a
    cut the next stream is tried for ``resume_timeout``.

    Args:
        invitation: Invitation to the server.
        limits: Limits of what the server may send.
        deadline: Time at which the lane ends, on ``time.monotonic``'s clock.
        resume_timeout: Seconds in which a stream that was cut must be replaced.
        patience: Seconds for which a refusal, or the lack of an answer, may pass.
        busy_until: When to stop asking a server without room; None is the deadline.

    Raises:
        HandshakeError: The server refuses; its subclasses say why.
        LaneTimeoutError: The server does not answer.
        LaneUnreachableError: No server can be reached at this address.

    """
    # The thread that keeps it open ends it if it can't be resumed, and says why.
    lane = Lane(invitation.identity, limits, is_client=True, resume_timeout=math.inf)
    connection = _dial_until(
        lane=lane,
        invitation=invitation,
        deadline=deadline,
        patience=patience,
        busy_until=deadline if busy_until is None else busy_until,
    )
    keeper = threading.Thread(
        target=_keep_open,
        args=(lane, invitation, connection, deadline, resume_timeout),
        name=f"lane {invitation.identity.node}",
        daemon=True,
    )
    _attach(lane, connection)
    keeper.start()
    return lane


@dataclass(frozen=True)
class _Connection:
    """A stream that the server has confirmed.

    Attributes:
        stream: Encrypts and decrypts.
        records: Records that arrive.
        send: Sends what an iterator yields, in gRPC's thread.
        acknowledged: How many of the lane's frames the server has.

    """

    stream: Stream
    records: Iterable[bytes]
    send: Callable[[Iterator[bytes] | None], None]
    acknowledged: int


def _keep_open(
    lane: Lane,
    invitation: Invitation,
    connection: _Connection,
    deadline: float,
    resume_timeout: float,
) -> None:
    """Read a lane's streams, one after another, until the lane ends."""
    with _failing_at(deadline, lane):
        while True:
            opened = time.monotonic()
            lane.read(connection.stream, connection.records)
            connection.stream.release()
            if lane.ended:
                return
            if time.monotonic() >= deadline - RETRY_SECONDS:
                return lane.fail(LaneDeadlineError("the lane's time is over (round-timeout)"))
            # The server has confirmed this stream, so it knows its ticket.
            invitation = replace(invitation, ticket=connection.stream.resumption)
            _LOG.warning("%r was cut; opening another stream", lane)
            if not connection.stream.exhausted:
                lane.wait_ended(opened + RETRY_SECONDS - time.monotonic())
            try:
                connection = _dial_until(
                    lane=lane, invitation=invitation, deadline=deadline, patience=resume_timeout
                )
            except Exception as error:
                # Only our own errors' words are for people.
                reason = str(error) if isinstance(error, LaneError) else type(error).__name__
                words = f"the lane was cut, and could not be resumed: {reason}"
                return lane.fail(LaneCutError(words))
            _attach(lane, connection)


@contextmanager
def _failing_at(deadline: float, lane: Lane) -> Iterator[None]:
    """End the lane at its deadline, whatever the block and the lane's threads wait for then."""
    over = LaneDeadlineError("the lane's time is over (round-timeout)")
    limit = threading.Timer(max(0.0, deadline - time.monotonic()), lane.fail, [over])
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


def _attach(lane: Lane, connection: _Connection) -> None:
    # Nothing arrives between the two: the stream before has ended.
    received = lane.detach("another stream follows")
    confirmation = connection.stream.confirm(received)
    lane.attach(connection.stream, connection.acknowledged)
    connection.send(chain([confirmation], lane.messages(connection.stream)))
    connection.send(None)


def _dial_until(
    lane: Lane,
    invitation: Invitation,
    deadline: float,
    patience: float,
    busy_until: float = 0.0,
) -> _Connection:
    """Try to open a stream, once a second.

    Args:
        lane: The lane that needs the stream; the attempt ends when it does.
        invitation: The invitation, with the ticket to use.
        deadline: Deadline of the lane, on ``time.monotonic``'s clock.
        patience: Seconds for which it may fail, from the last answer that the server is busy.
        busy_until: Time from which such an answer is final.

    """
    until = min(deadline, time.monotonic() + patience)
    while True:
        try:
            return _dial(invitation, lane.limits, deadline)
        except LaneError as error:
            now = time.monotonic()
            if isinstance(error, LaneBusyError) and now + RETRY_SECONDS <= busy_until:
                until = max(until, min(busy_until, now + patience + RETRY_SECONDS))
            if now + RETRY_SECONDS > until:
                raise
            _LOG.debug("%r: %s; trying again", lane, error)
        if lane.wait_ended(RETRY_SECONDS):
            lane.check()


def _dial(invitation: Invitation, limits: Limits, deadline: float) -> _Connection:
    """Open a stream: connect, shake hands, and wait until the server has confirmed it."""
    handshake = ClientHandshake(
        ticket=invitation.ticket,
        identity=invitation.identity,
        server_public=invitation.server_key,
        suite=known_suite(invitation.suite),
    )
    hello = handshake.hello()
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise LaneTimeoutError("the lane's time is over before it was opened")
    address = invitation.address
    channel = grpc.insecure_channel(address, options=channel_options(address))
    outgoing = Outbox(iter([hello]))
    method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    call = method(outgoing, timeout=remaining)

    def release() -> None:
        outgoing.put(None)
        call.cancel()
        channel.close()

    limit = threading.Timer(min(HANDSHAKE_SECONDS, remaining), call.cancel)
    limit.daemon = True
    limit.start()
    try:
        answer = next(call)
        finished, secrets = handshake.finish(answer)
        outgoing.put(iter([finished]))
        carried = (wire_bytes(hello) + wire_bytes(finished), wire_bytes(answer))
        stream = Stream(secrets, limits, is_client=True, carried=carried, release=release)
        acknowledged = stream.confirmation(next(call))
        return _Connection(
            stream=stream, records=call, send=outgoing.put, acknowledged=acknowledged
        )
    except StopIteration:
        release()
        words = f"the block server at {address} ended the handshake"
        raise LaneUnreachableError(words) from None
    except grpc.RpcError as error:
        in_time = limit.is_alive()
        release()
        # Without gRPC's words: they are long and name no setting.
        raise _handshake_error(error, address, in_time) from None
    except BaseException:
        release()
        raise
    finally:
        limit.cancel()


def _handshake_error(error: grpc.RpcError, address: str, in_time: bool) -> LaneError:
    refusal = refusal_of(error)
    if refusal is not None:
        return refused(refusal)
    code = error.code() if isinstance(error, grpc.Call) else None
    if not in_time or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LaneTimeoutError(f"the block server at {address} did not answer")
    if code is grpc.StatusCode.CANCELLED:
        # By the server: the stream was too slow, or was displaced by another one.
        return refused(Refusal.BUSY)
    return LaneUnreachableError(
        f"the block server at {address} can't be reached, or ended the handshake"
        f"{f' ({code.name})' if code is not None else ''}; clients reach it at split.advertise, or "
        "where it listens if that is empty"
    )
