"""The server's side of lanes: accept streams and handshakes, and serve each lane in a thread."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import grpc

from split.lane.half_open import AnsweredHandshakes, RefusedHandshakes, SilentStreams, host_of
from split.lane.lane import Lane
from split.lane.stream import Stream, wire_bytes
from split.lane.transport import CLOSE_SECONDS, METHOD, REFUSED, SERVICE, PeerLimits, server_options
from split.protocol.errors import FrameError, HandshakeError, LaneError, Refusal
from split.protocol.frames import Limits
from split.protocol.handshake import ServerHandshake
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity, Ticket, TicketBook

_LOG = logging.getLogger(__name__)


class LaneServer:
    """Server that listens for lanes. Port 0 in ``listen`` chooses a free port.

    Each lane is served by ``on_lane`` in a separate thread, and closed when the function returns. A
    lane ends if its client does not replace a cut stream within ``resume_timeout`` seconds.

    Raise ``OSError`` if the server can't listen on the address.
    """

    def __init__(
        self,
        listen: str,
        keys: ServerKeys,
        limits: Limits,
        on_lane: Callable[[Lane], None],
        max_lanes: int = 256,
        resume_timeout: float = 30.0,
        peers: PeerLimits | None = None,
    ) -> None:
        self._keys = keys
        self._tickets = TicketBook()
        self._limits = limits
        self._resume_timeout = resume_timeout
        self._peers = peers = peers or PeerLimits()
        self._on_lane = on_lane
        self._silent = SilentStreams(peers.half_open, peers.silent_seconds)
        self._answered = AnsweredHandshakes(
            peers.half_open, peers.of_one_identity, peers.handshake_seconds
        )
        self._max_lanes = max_lanes
        self._lock = threading.Lock()
        self._lanes: dict[bytes, Lane] = {}  # by identifier in ``TicketBook``, including ended ones
        self._unconfirmed: dict[bytes, Stream] = {}  # each lane's newest stream, if unconfirmed
        self._threads: set[threading.Thread] = set()  # one per lane that is served
        self._stopping = False
        self._refused = RefusedHandshakes()
        # Allow for silent streams that were ended but whose calls have not returned yet.
        calls = max_lanes + 3 * peers.half_open
        self._server = grpc.server(
            _ThreadPerCall(), options=server_options(calls, peers), maximum_concurrent_rpcs=calls
        )
        handler = grpc.stream_stream_rpc_method_handler(self._open)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise OSError(
                f"the block server can't listen on {listen}: the port is in use, or this machine "
                "does not have that address; change split.listen"
            ) from None
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Start accepting streams."""
        self._server.start()
        _LOG.info("the block server listens on %s", self.address)

    def issue(self, identity: Identity, lifetime: float, standing: bool = False) -> Ticket:
        """Issue a ticket; see ``TicketBook.issue``."""
        with self._lock:
            return self._tickets.issue(identity, lifetime, standing)

    def stop(self) -> None:
        """Stop accepting streams, end all lanes, and wait for their threads with a timeout."""
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
        """Handle one gRPC call; the call's thread sends the records of the stream."""
        try:
            lane, stream = yield from self._shake_hands(requests, context)
        except HandshakeError as error:
            self._refused.note(error)
            code = grpc.StatusCode.UNAUTHENTICATED
            if error.refusal is Refusal.BUSY:
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
            context.abort(code, f"{REFUSED}{error.refusal}")
        threading.Thread(
            target=lane.read,
            args=(stream, requests),
            name=f"read {lane.identity.node}",
            daemon=True,
        ).start()
        yield from lane.messages(stream)

    def _shake_hands(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Generator[bytes, None, tuple[Lane, Stream]]:
        """Exchange M1 to M3 and both ends' CONFIRM; limit the number and duration of handshakes."""
        handshake = ServerHandshake(self._keys, self._tickets)
        with self._silent.count(host_of(context.peer()), context.cancel):
            hello = _next(requests)
        with self._lock:
            self._check_room()
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
            number, received = self._accept(used, identity, stream)
            try:
                yield stream.confirm(received)
                stream.open_confirmation(_next(requests))
                return self._confirm(number, identity, stream), stream
            except FrameError:
                raise HandshakeError(Refusal.AUTHENTICATION) from None
            finally:
                with self._lock:
                    if self._unconfirmed.get(number) is stream:
                        del self._unconfirmed[number]

    def _accept(self, ticket: bytes, identity: Identity, stream: Stream) -> tuple[bytes, int]:
        """Record a handshake; return the lane's identifier and the number of frames received."""
        with self._lock:
            number = self._tickets.accept(ticket, stream.resumption)
            lane = self._lanes.get(number)
            self._check_room(None if lane else identity)
            # The client opens one stream at a time. Accept no more frames from earlier streams, so
            # that the number of received frames stays valid.
            self._unconfirmed[number] = stream
            if lane is None:
                return number, 0
            return number, lane.detach("the client has opened another stream")

    def _confirm(self, number: bytes, identity: Identity, stream: Stream) -> Lane:
        """Continue a lane over a stream whose first record was decrypted, or begin a new lane."""
        with self._lock:
            if self._unconfirmed.get(number) is not stream:
                raise HandshakeError(Refusal.TICKET_USED)
            known = self._lanes.get(number)
            self._check_room(None if known else identity)
            self._tickets.confirm(number, stream.resumption.identifier)
            lane = known or self._new_lane(number, identity)
            lane.attach(stream)
            if known is None:
                name = f"serve {identity.node}"
                thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
                self._threads.add(thread)
                thread.start()
            return lane

    def _new_lane(self, number: bytes, identity: Identity) -> Lane:
        # Keep ended lanes for some time, so that a reconnecting client receives the reason.
        before = time.monotonic() - self._resume_timeout - self._peers.handshake_seconds
        for key in [key for key, lane in self._lanes.items() if lane.ended_at < before]:
            del self._lanes[key]
            self._tickets.close(key)
        lane = Lane(
            identity,
            self._limits,
            is_client=False,
            resume_timeout=self._resume_timeout,
            max_streams=self._peers.max_streams,
        )
        self._lanes[number] = lane
        return lane

    def _check_room(self, new: Identity | None = None) -> None:
        """Refuse a stream if the server stops, or if it is for a new lane and there are too many.

        A lane that a client has replaced counts until the server's current job for it has ended.
        """
        threads = [thread.name for thread in self._threads]
        own = 0 if new is None else threads.count(f"serve {new.node}")
        full = len(threads) >= self._max_lanes or own >= self._peers.lanes_of_one_identity
        if self._stopping or (new and full):
            raise HandshakeError(Refusal.BUSY)

    def _serve(self, lane: Lane) -> None:
        """Call ``on_lane`` for a lane, and close the lane when it returns."""
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
    """Executor with a new thread per call. A pool would keep threads after a flood of calls."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a new thread."""
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
        raise HandshakeError(Refusal.MALFORMED)
    return message
