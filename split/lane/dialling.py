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
    REFUSED,
    SERVICE,
    channel_options,
    lane_error,
    status_of,
    time_limit,
)
from split.protocol.errors import (
    HandshakeError,
    LaneCutError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    LaneUnreachableError,
    Refusal,
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

    Raise ``HandshakeError`` if the server refused the handshake; ``refusal`` is the reason. Raise
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
    stream, records = dialler.dial(patience, deadline if busy_until is None else busy_until)
    threading.Thread(
        target=dialler.keep_open,
        args=(stream, records, resume_timeout),
        name=f"lane {invitation.identity.node}",
        daemon=True,
    ).start()
    return lane


@dataclass
class _Dialler:
    """Opens the streams of one lane, one after another."""

    lane: Lane
    invitation: Invitation  # with the ticket for the next stream
    deadline: float
    retry_seconds: float

    def keep_open(self, stream: Stream, records: Iterable[bytes], resume_timeout: float) -> None:
        """Read the streams, and replace each one that was cut, until the lane ends."""
        lane = self.lane
        over = LaneDeadlineError("the lane's deadline has passed (round-timeout)")
        # End the lane at the deadline even if this or other threads are waiting.
        with time_limit(max(0.0, self.deadline - time.monotonic()), partial(lane.fail, over)):
            while True:
                opened = time.monotonic()
                lane.read(stream, records)
                stream.release()
                if lane.wait_ended(0.0):
                    return
                if time.monotonic() >= self.deadline - self.retry_seconds:
                    return lane.fail(over)
                # The server has confirmed this stream, so its resumption ticket is valid.
                self.invitation = replace(self.invitation, ticket=stream.resumption)
                _LOG.warning("%r was cut; opening another stream", lane)
                if stream.used_bytes < lane.replace_after_bytes:
                    lane.wait_ended(opened + self.retry_seconds - time.monotonic())
                try:
                    stream, records = self.dial(resume_timeout)
                except Exception as error:
                    words = f"the lane was cut, and could not be resumed: {lane_error(error)}"
                    return lane.fail(LaneCutError(words))

    def dial(self, patience: float, busy_until: float = 0.0) -> tuple[Stream, Iterable[bytes]]:
        """Continue the lane over a new stream; after a failure, retry unless the lane has ended.

        Return the stream and the iterator over its arriving records. Raise the last error after
        ``patience`` seconds, counted from the call or, if the server was busy, from its last such
        answer before ``busy_until``.
        """
        until = min(self.deadline, time.monotonic() + patience)
        while True:
            try:
                return _dial(self.lane, self.invitation, self.deadline)
            except LaneError as error:
                now = time.monotonic()
                is_busy = isinstance(error, HandshakeError) and error.refusal is Refusal.BUSY
                if is_busy and now + self.retry_seconds <= busy_until:
                    until = max(until, min(busy_until, now + patience + self.retry_seconds))
                if now + self.retry_seconds > until:
                    raise
                _LOG.debug("%r: %s; trying again", self.lane, error)
            if self.lane.wait_ended(self.retry_seconds):
                self.lane.check()


def _dial(lane: Lane, invitation: Invitation, deadline: float) -> tuple[Stream, Iterable[bytes]]:
    """Connect, do the handshake, and continue the lane when the server has confirmed the stream."""
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
    # One of gRPC's threads sends the messages of each iterator; None ends the stream.
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
            stream = Stream(secrets, lane.limits, is_client=True, carried=carried, release=release)
            stream.open_confirmation(next(call))
        except StopIteration:
            words = f"the block server at {address} ended the handshake"
            raise LaneUnreachableError(words) from None
        except grpc.RpcError as error:
            # Omit gRPC's message, which is long and does not mention the relevant settings.
            raise _handshake_error(error, address, timer.is_alive()) from None
        on_failure.pop_all()
    # No frames arrive between detach and attach, because the previous stream has ended.
    confirmation = stream.confirm(lane.detach("another stream follows"))
    lane.attach(stream)
    outgoing.put(chain([confirmation], lane.messages(stream)))
    outgoing.put(None)
    return stream, call


def _handshake_error(error: grpc.RpcError, address: str, in_time: bool) -> LaneError:
    """Return the error for a status, which anyone on the network may have sent."""
    code, details = status_of(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return HandshakeError(Refusal.BUSY)
    reason = details.removeprefix(REFUSED)
    if reason != details and reason in list(Refusal):
        return HandshakeError(Refusal(reason))
    if not in_time or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LaneTimeoutError(f"the block server at {address} did not answer")
    if code is grpc.StatusCode.CANCELLED:
        # The server cancelled the stream: the client was too slow or too many streams were open.
        return HandshakeError(Refusal.BUSY)
    return LaneUnreachableError(
        f"the block server at {address} can't be reached, or ended the handshake"
        f"{f' ({code.name})' if code is not None else ''}; check split.advertise or, if that is "
        "empty, split.listen"
    )
