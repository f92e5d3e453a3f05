"""A lane server whose lanes are served by a test, and a man in the middle."""

import functools
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest
import torch

from split.lane.dialling import open_lane
from split.lane.listening import LaneServer
from split.lane.transport import METHOD, REFUSED, SERVICE
from split.protocol.errors import HandshakeError, LaneError, LaneTimeoutError
from split.protocol.frames import Limits
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity, Invitation

HYBRID = "ml-kem-768-x25519"
HIDDEN = 64
LIMITS = Limits(HIDDEN, "float32", 65536, average_bytes=2**24)
COURT = Identity("run", 1, "court")
SOON = 20.0  # seconds in which everything here has happened


@functools.cache
def hybrid_keys():
    return ServerKeys(HYBRID)


class Server:
    """A lane server whose lanes are served by the test."""

    def __init__(
        self,
        keys=None,
        limits=LIMITS,
        max_lanes=8,
        resume_timeout=SOON,
        on_lane=None,
        peers=None,
    ):
        self.keys = keys or hybrid_keys()
        self.lanes = queue.SimpleQueue()
        self.done = threading.Event()
        self.server = LaneServer(
            "127.0.0.1:0",
            self.keys,
            limits,
            on_lane or self.on_lane,
            max_lanes,
            resume_timeout,
            peers,
        )
        self.address = self.server.address
        self.server.start()

    def on_lane(self, lane):
        self.lanes.put(lane)
        self.done.wait(SOON)

    def ticket(self, identity=COURT, lifetime=SOON):
        return self.server.issue(identity, lifetime)

    def invitation(self, ticket=None, identity=COURT, address=None, public=None, suite=None):
        return Invitation(
            address=address or self.address,
            suite=suite or self.keys.suite,
            server_key=public or self.keys.public,
            identity=identity,
            ticket=ticket or self.ticket(identity),
        )

    def client(
        self,
        ticket=None,
        identity=COURT,
        address=None,
        limits=LIMITS,
        seconds=SOON,
        resume_timeout=SOON,
        patience=0.0,
        public=None,
        suite=None,
        **options,
    ):
        """Open a lane; a refusal is final unless ``patience`` is given."""
        invitation = self.invitation(ticket, identity, address, public, suite)
        now = time.monotonic()
        return open_lane(
            invitation,
            limits,
            now + seconds,
            resume_timeout,
            patience,
            busy_until=now + patience,
            retry_seconds=0.05,
            **options,
        )

    def pair(self, **options):
        client = self.client(**options)
        return client, self.lanes.get(timeout=SOON)

    def stop(self):
        self.done.set()
        self.server.stop()


@contextmanager
def serving(**options):
    made = Server(**options)
    try:
        yield made
    finally:
        made.stop()


def ended(lane, kind=LaneError, match=None):
    """Receive until the lane ends."""
    with pytest.raises(kind, match=match) as raised:
        while True:
            lane.receive(SOON)
    assert not (isinstance(raised.value, LaneTimeoutError) and kind is LaneError)
    return raised.value


def refusal(call, kind=HandshakeError):
    """Return the reason for which ``call`` can't open a lane."""
    with pytest.raises(kind) as raised:
        call()
    return raised.value


def tokens(rows=2, columns=40, seed=0):
    return torch.randn(rows, columns, HIDDEN, generator=torch.Generator().manual_seed(seed))


def cut(lane):
    """Cut the stream under a client's lane."""
    lane.detach("cut by the test")


class ForgedError(Exception):
    """Ends a stream with a refusal that the server has not sent."""

    def __init__(self, refusal):
        super().__init__(f"{REFUSED}{refusal}")


class Relay:
    """A man in the middle that can read and change every message.

    ``up`` and ``down`` take the number and the bytes of a message and return a list of the messages
    that are forwarded instead; None cuts the stream. ``down`` may raise a ForgedError.
    """

    def __init__(self, address, up=None, down=None):
        self.up, self.down = up or (lambda _, message: [message]), down or (lambda _, m: [m])
        self.heard = []
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.max_receive_message_length", -1)]
        )
        self._server = grpc.server(
            ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._pass)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _altered(self, messages, change):
        for number, message in enumerate(messages):
            self.heard.append(message)
            passed = change(number, message)
            if passed is None:
                return
            yield from passed

    def _pass(self, requests, context):
        call = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")(
            self._altered(requests, self.up), timeout=SOON
        )
        context.add_callback(call.cancel)
        try:
            yield from self._altered(call, self.down)
        except ForgedError as forgery:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(forgery))
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def stop(self):
        self._server.stop(0).wait(SOON)
        self._channel.close()


@contextmanager
def relaying(server, **options):
    relay = Relay(server.address, **options)
    try:
        yield relay
    finally:
        relay.stop()


def changing(number, change):
    """Return an ``up`` that changes one message of the client; 0 and 1 belong to the handshake."""
    held = []

    def up(index, message):
        held.append(message)
        return change(held, message) if index == number else [message]

    return up


class Proxy:
    """Forwards TCP and counts the bytes, until it stops."""

    def __init__(self, address, port=0):
        host, target = address.split(":")
        self._target = (host, int(target))
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.up = self.down = 0
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, target, name in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(
                        target=self._pump, args=(source, target, name), daemon=True
                    ).start()

    def _pump(self, source, target, name):
        with suppress(OSError):
            while content := source.recv(65536):
                setattr(self, name, getattr(self, name) + len(content))
                target.sendall(content)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Cut the connections; new ones are accepted."""
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stop(self):
        """Cut the connections, and accept no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for end in self._sockets:
            end.close()
