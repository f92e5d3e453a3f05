"""The client's side of lanes: open a lane and its streams, with retries."""

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from queue import SimpleQueue

import grpc

from split.lane.lane import REPLACE_AFTER_BYTES, Lane
from split.lane.stream import Stream, wire_bytes
from split.lane.transport import (
    HANDSHAKE_SECONDS,
    METHOD,
    SERVICE,
    channel_options,
    lane_error,
    refusal_of,
    status_of,
    time_limit,
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
from split.protocol.keys import known_suite
from split.protocol.tickets import Invitation

_LOG = logging.getLogger(__name__)
PATIENCE_SECONDS = 15.0


def open_lane(
    invitation: Invitation,
    limits: Limits,
    deadline: float,
    resume_timeout: float,
    patience: float = PATIENCE_SECONDS,
    busy_until: float | None = None,
    retry_seconds: float = 1.0,
    replace_after_bytes: int = REPLACE_AFTER_BYTES,
) -> Lane:
    """Open a lane to the block server, and keep it open in a separate thread.

    Until the server has confirmed a handshake, its answers are not authenticated, so the client
    retries with the same ticket after any failure. While the server is busy, retry until
    ``busy_until`` (None: until the deadline). After other failures (refusals and missing answers),
    retry for ``patience`` seconds. After a cut, try for ``resume_timeout`` seconds to open a new
    stream. Attempts are ``retry_seconds`` apart. The client also replaces a stream that has
    carried ``replace_after_bytes`` bytes in one direction. The lane ends at the deadline. The
    deadline and ``busy_until`` are on ``time.monotonic``'s clock.

    Raise ``HandshakeError`` if the server refused the handshake; subclasses state the reason. Raise
    ``LaneTimeoutError`` if the server did not answer. Raise ``LaneUnreachableError`` if the server
    can't be reached, or ended the handshake.
    """
    # No resume timeout here: if resuming fails, the thread below ends the lane with the reason.
    lane = Lane(
        invitation.identity,
        limits,
        is_client=True,
        resume_timeout=math.inf,
        replace_after_bytes=replace_after_bytes,
    )
    dialler = _Dialler(lane, invitation, deadline, retry_seconds)
    connection = dialler.dial(patience, deadline if busy_until is None else busy_until)
    _attach(lane, connection)
    threading.Thread(
        target=dialler.keep_open,
        args=(connection, resume_timeout),
        name=f"lane {invitation.identity.node}",
        daemon=True,
    ).start()
    return lane


@dataclass(frozen=True)
class _Connection:
    """A stream that the server has confirmed, its arriving records, and the messages to send.

    One of gRPC's threads sends the messages of each iterator in ``outgoing``; None ends the stream.
    """

    stream: Stream
    records: Iterable[bytes]
    outgoing: SimpleQueue[Iterator[bytes] | None]


@dataclass
class _Dialler:
    """Opens the streams of one lane, one after another."""

    lane: Lane
    invitation: Invitation  # with the ticket for the next stream
    deadline: float
    retry_seconds: float

    def keep_open(self, connection: _Connection, resume_timeout: float) -> None:
        """Read the streams, and replace each one that was cut, until the lane ends."""
        lane = self.lane
        over = LaneDeadlineError("the lane's deadline has passed (round-timeout)")
        # End the lane at the deadline even if this or other threads are waiting.
        with time_limit(max(0.0, self.deadline - time.monotonic()), partial(lane.fail, over)):
            while True:
                opened = time.monotonic()
                lane.read(connection.stream, connection.records)
                connection.stream.release()
                if lane.ended:
                    return
                if time.monotonic() >= self.deadline - self.retry_seconds:
                    return lane.fail(over)
                # The server has confirmed this stream, so its resumption ticket is valid.
                self.invitation = replace(self.invitation, ticket=connection.stream.resumption)
                _LOG.warning("%r was cut; opening another stream", lane)
                if connection.stream.used_bytes < lane.replace_after_bytes:
                    lane.wait_ended(opened + self.retry_seconds - time.monotonic())
                try:
                    connection = self.dial(resume_timeout)
                except Exception as error:
                    words = f"the lane was cut, and could not be resumed: {lane_error(error)}"
                    return lane.fail(LaneCutError(words))
                _attach(lane, connection)

    def dial(self, patience: float, busy_until: float = 0.0) -> _Connection:
        """Open a stream; after a failure, retry unless the lane has ended.

        Raise the last error after ``patience`` seconds, counted from the call or, if the server was
        busy, from its last such answer before ``busy_until``.
        """
        until = min(self.deadline, time.monotonic() + patience)
        while True:
            try:
                return _dial(self.invitation, self.lane.limits, self.deadline)
            except LaneError as error:
                now = time.monotonic()
                if isinstance(error, LaneBusyError) and now + self.retry_seconds <= busy_until:
                    until = max(until, min(busy_until, now + patience + self.retry_seconds))
                if now + self.retry_seconds > until:
                    raise
                _LOG.debug("%r: %s; trying again", self.lane, error)
            if self.lane.wait_ended(self.retry_seconds):
                self.lane.check()


def _attach(lane: Lane, connection: _Connection) -> None:
    # No frames arrive between detach and attach, because the previous stream has ended.
    received = lane.detach("another stream follows")
    confirmation = connection.stream.confirm(received)
    lane.attach(connection.stream)
    connection.outgoing.put(chain([confirmation], lane.messages(connection.stream)))
    connection.outgoing.put(None)


def _dial(invitation: Invitation, limits: Limits, deadline: float) -> _Connection:
    """Open a stream: connect, do the handshake, and wait for the server's confirmation."""
    handshake = ClientHandshake(
        ticket=invitation.ticket,
        identity=invitation.identity,
        server_public=invitation.server_key,
        suite=known_suite(invitation.suite),
    )
    hello = handshake.hello()
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise LaneTimeoutError("the lane's deadline had passed before the lane was opened")
    address = invitation.address
    channel = grpc.insecure_channel(address, options=channel_options(address))
    outgoing: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
    outgoing.put(iter([hello]))
    method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
    call = method(chain.from_iterable(iter(outgoing.get, None)), timeout=remaining)

    def release() -> None:
        outgoing.put(None)
        call.cancel()
        channel.close()

    timeout = min(HANDSHAKE_SECONDS, remaining)
    with ExitStack() as on_failure, time_limit(timeout, call.cancel) as timer:
        on_failure.callback(release)
        try:
            answer = next(call)
            finished, secrets = handshake.finish(answer)
            outgoing.put(iter([finished]))
            carried = (wire_bytes(hello) + wire_bytes(finished), wire_bytes(answer))
            stream = Stream(secrets, limits, is_client=True, carried=carried, release=release)
            stream.open_confirmation(next(call))
        except StopIteration:
            words = f"the block server at {address} ended the handshake"
            raise LaneUnreachableError(words) from None
        except grpc.RpcError as error:
            # Omit gRPC's message, which is long and does not mention the relevant settings.
            raise _handshake_error(error, address, timer.is_alive()) from None
        on_failure.pop_all()
        return _Connection(stream, records=call, outgoing=outgoing)


def _handshake_error(error: grpc.RpcError, address: str, in_time: bool) -> LaneError:
    refusal = refusal_of(error)
    if refusal is not None:
        return refused(refusal)
    code, _ = status_of(error)
    if not in_time or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LaneTimeoutError(f"the block server at {address} did not answer")
    if code is grpc.StatusCode.CANCELLED:
        # The server cancelled the stream: the client was too slow or too many streams were open.
        return refused(Refusal.BUSY)
    return LaneUnreachableError(
        f"the block server at {address} can't be reached, or ended the handshake"
        f"{f' ({code.name})' if code is not None else ''}; check split.advertise or, if that is "
        "empty, split.listen"
    )
