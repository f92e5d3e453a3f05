"""The server's side of lanes: accept streams, shake hands, and serve each lane in a thread."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc

from split.lane.half_open import AnsweredHandshakes, SilentStreams, host_of
from split.lane.lane import Lane
from split.lane.stream import Stream, wire_bytes
from split.lane.transport import (
    CLOSE_SECONDS,
    HANDSHAKE_SECONDS,
    METHOD,
    SERVICE,
    SILENT_SECONDS,
    refusal_details,
    server_options,
)
from split.protocol.errors import FrameError, HandshakeError, LaneError, Refusal, refused
from split.protocol.frames import Limits
from split.protocol.handshake import ServerHandshake
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity, Ticket, TicketBook

_LOG = logging.getLogger(__name__)
_HALF_OPEN = 32  # streams without a message, and as many unfinished handshakes
_OF_ONE_IDENTITY = 4  # unfinished handshakes
_LOG_SECONDS = 10.0


class LaneServer:
    """Listens for lanes.

    Args:
        listen: Host and port; port 0 is a free one.
        keys: The server's key pair.
        limits: Limits of what clients may send.
        on_lane: Serves a lane; it is called in a thread of the lane's own, and when it returns the
            lane is closed.
        maximum_lanes: How many there may be at once.
        resume_timeout: Seconds in which a client must replace a stream that was cut.

    Raises:
        OSError: The address can't be listened on.

    """

    def __init__(
        self,
        listen: str,
        keys: ServerKeys,
        limits: Limits,
        on_lane: Callable[[Lane], None],
        maximum_lanes: int = 64,
        resume_timeout: float = 30.0,
    ) -> None:
        self._keys = keys
        self._tickets = TicketBook()
        self._limits = limits
        self._resume_timeout = resume_timeout
        self._on_lane = on_lane
        self._silent = SilentStreams(_HALF_OPEN, SILENT_SECONDS)
        self._answered = AnsweredHandshakes(_HALF_OPEN, _OF_ONE_IDENTITY, HANDSHAKE_SECONDS)
        self._maximum_lanes = maximum_lanes
        self._lock = threading.Lock()
        self._lanes: dict[bytes, Lane] = {}  # by what their tickets name; ended ones, too
        self._unconfirmed: dict[bytes, Stream] = {}  # each lane's newest, until its first record
        self._threads: set[threading.Thread] = set()  # one for every lane that is served
        self._stopping = False
        self._refusals = 0  # that are not in the log yet
        self._next_line = 0.0
        # Streams that were displaced are still there for a moment.
        calls = maximum_lanes + 3 * _HALF_OPEN
        self._server = grpc.server(
            _ThreadPerCall(),
            options=server_options(calls),
            maximum_concurrent_rpcs=calls,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._open)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(
                f"the block server can't listen on {listen}: the port is in use, or the address "
                "is not one of this machine; change split.listen"
            )
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Begin to accept streams."""
        self._server.start()
        _LOG.info("the block server listens on %s", self.address)

    def issue(self, identity: Identity, lifetime: float, standing: bool = False) -> Ticket:
        """Make a ticket; see ``TicketBook.issue``."""
        with self._lock:
            return self._tickets.issue(identity, lifetime, standing)

    def stop(self) -> None:
        """Accept no more streams, end all lanes, and wait for their threads, for a while."""
        with self._lock:
            self._stopping = True
            lanes, threads = list(self._lanes.values()), list(self._threads)
        for lane in lanes:
            lane.close("the server has stopped")
        self._server.stop(CLOSE_SECONDS).wait(2 * CLOSE_SECONDS)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def _open(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one call, in the thread that becomes its stream's writer."""
        try:
            lane, stream = yield from self._shake_hands(requests, context)
        except HandshakeError as error:
            self._note_refusal(error)
            code = grpc.StatusCode.UNAUTHENTICATED
            if error.refusal is Refusal.BUSY:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            context.abort(code, refusal_details(error.refusal))
        reader = threading.Thread(
            target=lane.read,
            args=(stream, requests),
            name=f"read {lane.identity.node}",
            daemon=True,
        )
        reader.start()
        yield from lane.messages(stream)

    def _shake_hands(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, tuple[Lane, Stream]]:
        """Exchange M1, M2, M3 and both ends' CONFIRM, within limits of number and time."""
        handshake = ServerHandshake(self._keys, self._tickets)
        with self._silent.count(host_of(context.peer()), context.cancel):
            hello = _next(requests)
        with self._lock:
            self._check_room(new=False)
            identity = handshake.read(hello)
        with self._answered.count(identity, context.cancel):
            answer = handshake.answer()
            yield answer
            finished = _next(requests)
            carried = (wire_bytes(answer), wire_bytes(hello) + wire_bytes(finished))
            secrets, used = handshake.accept(finished)
            stream = Stream(
                secrets, self._limits, is_client=False, carried=carried, release=context.cancel
            )
            number, received = self._accept(used, stream)
            try:
                yield stream.confirm(received)
                acknowledged = _confirmation(stream, requests)
                return self._confirm(
                    number=number, identity=identity, stream=stream, acknowledged=acknowledged
                ), stream
            finally:
                with self._lock:
                    if self._unconfirmed.get(number) is stream:
                        del self._unconfirmed[number]

    def _accept(self, ticket: bytes, stream: Stream) -> tuple[bytes, int]:
        """Note a finished handshake; return its lane's number, and how many frames have arrived."""
        with self._lock:
            number = self._tickets.accept(ticket, stream.resumption)
            lane = self._lanes.get(number)
            self._check_room(new=lane is None)
            # The client opens one stream after another. From here on nothing is taken from those
            # before, so that the count stays true.
            self._unconfirmed[number] = stream
            if lane is None:
                return number, 0
            return number, lane.detach("the client has opened another stream")

    def _confirm(
        self, number: bytes, identity: Identity, stream: Stream, acknowledged: int
    ) -> Lane:
        """Continue a lane over a stream whose first record has been opened, or begin a new lane."""
        with self._lock:
            if self._unconfirmed.get(number) is not stream:
                raise refused(Refusal.TICKET_USED)
            lane = self._lanes.get(number)
            self._check_room(new=lane is None)
            self._tickets.confirm(number, stream.resumption.identifier)
            if lane is not None:
                lane.attach(stream, acknowledged)
                return lane
            lane = self._new_lane(number, identity)
            lane.attach(stream, acknowledged)
            name = f"serve {identity.node}"
            thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
            self._threads.add(thread)
            thread.start()
            return lane

    def _new_lane(self, number: bytes, identity: Identity) -> Lane:
        # A client may open a stream a while after its lane has ended, to learn why.
        before = time.monotonic() - self._resume_timeout - HANDSHAKE_SECONDS
        for key in [key for key, lane in self._lanes.items() if lane.ended_at < before]:
            del self._lanes[key]
            self._tickets.close(key)
        lane = Lane(identity, self._limits, is_client=False, resume_timeout=self._resume_timeout)
        self._lanes[number] = lane
        return lane

    def _note_refusal(self, error: HandshakeError) -> None:
        """Log refusals, but only now and then: anybody can cause as many as they like."""
        with self._lock:
            self._refusals += 1
            if time.monotonic() < self._next_line:
                return
            count, self._refusals = self._refusals, 0
            self._next_line = time.monotonic() + _LOG_SECONDS
        _LOG.info("handshakes refused since the last such line: %d; this one: %s", count, error)

    def _check_room(self, new: bool) -> None:
        if self._stopping or (new and len(self._threads) >= self._maximum_lanes):
            raise refused(Refusal.BUSY)

    def _serve(self, lane: Lane) -> None:
        """Call the lane's user, and close the lane when it returns."""
        _LOG.info("%r opened", lane)
        try:
            self._on_lane(lane)
        except LaneError as error:
            lane.close(str(error))
        except Exception as error:
            _LOG.exception("serving %r failed", lane)
            lane.close(f"the server failed ({type(error).__name__})")
        finally:
            lane.close()
            with self._lock:
                self._threads.discard(threading.current_thread())


class _ThreadPerCall(Executor):
    """Runs each call in a new thread; a pool would never end the threads of a flood."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a new thread."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=call, name="lane writer", daemon=True).start()
        return future


def _next(requests: Iterator[bytes]) -> bytes:
    message = next(requests, None)
    if message is None:
        raise refused(Refusal.MALFORMED)
    return message


def _confirmation(stream: Stream, requests: Iterator[bytes]) -> int:
    try:
        return stream.confirmation(_next(requests))
    except FrameError:
        raise refused(Refusal.AUTHENTICATION) from None
