import base64
import functools
import logging
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import grpc
import pytest
import torch

from split import lane_end
from split.handshake import ClientHandshake
from split.keys import ServerKeys
from split.lane import (
    FrameError,
    HandshakeError,
    Kind,
    LaneBusyError,
    LaneClosedError,
    LaneCutError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    Limits,
    PeerError,
    ServerKeyError,
    TicketError,
    connect,
)
from split.lane_server import LaneServer
from split.lane_transport import METHOD, SERVICE
from split.tickets import Identity, Ticket, TicketBook

HYBRID = "ml-kem-768-x25519"
HIDDEN = 64
LIMITS = Limits(HIDDEN, "float32", 65536)
COURT = Identity("run", 1, "court")
SOON = 20.0  # seconds in which everything here has happened


@functools.cache
def hybrid_keys():
    return ServerKeys(HYBRID)


class Server:
    """A lane server whose lanes the test serves itself."""

    def __init__(self, keys=None, limits=LIMITS, maximum_lanes=8):
        self.keys = keys or hybrid_keys()
        self.book = TicketBook()
        self.lanes = queue.SimpleQueue()
        self.done = threading.Event()
        self.server = LaneServer(
            "127.0.0.1:0", self.keys, self.book, lambda _: limits, self.on_lane, maximum_lanes
        )
        self.address = self.server.address
        self.server.start()

    def on_lane(self, lane):
        self.lanes.put(lane)
        self.done.wait(SOON)

    def ticket(self, identity=COURT, lifetime=SOON):
        return self.book.issue(identity, lifetime)

    def client(self, ticket=None, identity=COURT, address=None, limits=LIMITS, seconds=SOON):
        return connect(
            address or self.address,
            ticket or self.ticket(identity),
            identity,
            self.keys.public,
            self.keys.suite,
            limits,
            time.monotonic() + seconds,
        )

    def pair(self, **options):
        client = self.client(**options)
        return client, self.lanes.get(timeout=SOON)

    def stop(self):
        self.done.set()
        self.server.stop()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.stop()


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
    """Find out why no lane comes about: ``connect`` says so, or the first ``receive``."""
    with pytest.raises(kind) as raised:
        call().receive(SOON)
    return raised.value


def tokens(rows=2, columns=40, seed=0):
    return torch.randn(rows, columns, HIDDEN, generator=torch.Generator().manual_seed(seed))


class Relay:
    """Somebody between client and server, who sees and may change every message.

    ``up`` and ``down`` take the number and the bytes of a message and give a list of what is
    passed on in its place; None cuts the stream.
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


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_hidden_states_go_and_come(wire):
    limits = Limits(HIDDEN, wire, 65536)
    with serving(limits=limits) as server:
        client, lane = server.pair(limits=limits)
        sent = tokens(4, 5000)  # more than a record
        lengths = torch.tensor([5000, 1, 2, 3])
        client.send(Kind.HIDDEN, 7, 3, {"hidden": sent, "lengths": lengths}, {"side": "right"})
        came = lane.receive(SOON)
        assert (came.kind, came.step, came.micro_batch) == (Kind.HIDDEN, 7, 3)
        assert came.fields == {"side": "right"}
        assert torch.equal(came.tensors["lengths"], lengths)
        expected = {"float32": sent, "bfloat16": sent.bfloat16()}.get(wire)
        if expected is not None:
            assert torch.equal(came.tensors["hidden"], expected)
        else:
            assert torch.allclose(came.tensors["hidden"], sent, atol=0.03)
        lane.send(Kind.GRADIENT, 7, 3, {"gradient": sent})
        assert client.receive(SOON).tensors["gradient"].shape == sent.shape
        client.close()


def test_frames_stay_in_order_both_ways(server):
    client, lane = server.pair()
    for number in range(100):
        client.send(Kind.STEP, number, fields={"x": number})
        lane.send(Kind.AVERAGE, number, tensors={"a": torch.full((1000,), float(number))})
    for number in range(100):
        assert lane.receive(SOON).fields == {"x": number}
        assert (client.receive(SOON).tensors["a"] == number).all()
    client.close()


def test_both_ends_agree_on_who_and_on_reconnecting(server):
    client, lane = server.pair()
    assert client.identity == lane.identity == COURT
    assert client.resumption == lane.resumption
    client.close()
    with pytest.raises(TicketError, match="not issued"):
        server.client(ticket=client.resumption)
    server.book.register(lane.resumption, lane.identity, SOON)
    again, lane = server.pair(ticket=client.resumption)
    again.send(Kind.JOIN, fields={"step": 4})
    assert lane.receive(SOON).fields == {"step": 4}
    again.close()


def test_rsa_lanes_work():
    with serving(keys=ServerKeys("rsa-3072")) as server:
        client, lane = server.pair()
        client.send(Kind.END)
        assert lane.receive(SOON).kind is Kind.END
        client.close()


def test_tickets_that_are_no_good_are_named(server):
    used = server.ticket()
    server.client(ticket=used).close()
    cases = {
        "not issued": (Ticket(bytes(16), bytes(32)), COURT),
        "has expired": (server.ticket(lifetime=0), COURT),
        "has been used": (used, COURT),
        "another run": (server.ticket(Identity("run", 1, "reasoning")), COURT),
    }
    for words, (ticket, identity) in cases.items():
        with pytest.raises(TicketError, match=words):
            server.client(ticket=ticket, identity=identity)


def test_the_old_key_is_refused_by_name_and_the_ticket_stays_good():
    with serving(keys=ServerKeys(HYBRID)) as server:
        ticket, old = server.ticket(), server.keys.public
        server.keys.rotate()
        with pytest.raises(ServerKeyError, match="server's key has changed"):
            connect(server.address, ticket, COURT, old, HYBRID, LIMITS, time.monotonic() + SOON)
        server.client(ticket=ticket).close()


@pytest.mark.parametrize(
    ("number", "place"),
    [(0, 0), (0, 4), (0, 6), (0, 30), (0, 60), (0, 700), (0, 1260), (1, 1), (1, 20)],
)
def test_an_altered_message_of_the_client_is_refused_and_the_ticket_stays_good(
    server, number, place
):
    def alter(index, message):
        if index == number:
            message = message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]
        return [message]

    ticket = server.ticket()
    with relaying(server, up=alter) as relay:
        refusal(lambda: server.client(ticket=ticket, address=relay.address))
    server.client(ticket=ticket).close()


@pytest.mark.parametrize("place", [0, 4, 5, 10, 37, 38, 69])
def test_an_altered_answer_of_the_server_is_refused_and_the_ticket_stays_good(server, place):
    def alter(_, message):
        return [message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]]

    ticket = server.ticket()
    with relaying(server, down=alter) as relay:
        refusal(lambda: server.client(ticket=ticket, address=relay.address))
    server.client(ticket=ticket).close()


def test_who_hears_everything_cannot_get_before_the_honest_client(server):
    ticket = server.ticket()
    handshake = ClientHandshake(ticket, COURT, server.keys.public, HYBRID)
    hello = handshake.hello()
    with closing(grpc.insecure_channel(server.address)) as channel:
        method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        messages = queue.SimpleQueue()
        messages.put(hello)
        thief = method(iter(messages.get, None), timeout=SOON)
        next(thief)  # the server answers: the bytes are an honest client's
        honest, lane = server.pair(ticket=ticket)
        messages.put(b"CHLN\x01\x03" + bytes(32))
        with pytest.raises(grpc.RpcError) as raised:
            next(thief)
        assert raised.value.details() == "chambers: authentication"
        honest.send(Kind.JOIN)
        assert lane.receive(SOON).kind is Kind.JOIN
        honest.close()


def test_of_two_lanes_with_one_ticket_one_comes_about(server):
    ticket = server.ticket()
    outcomes = queue.SimpleQueue()

    def open_one():
        try:
            lane = server.client(ticket=ticket)
            lane.send(Kind.JOIN)
            lane.receive(1.0)
        except LaneTimeoutError:
            outcomes.put("open")
            lane.close()
        except TicketError:
            outcomes.put("refused")

    threads = [threading.Thread(target=open_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(outcomes.get(timeout=1) for _ in threads) == ["open", "refused", "refused"]


def changing(number, change):
    """Alter the client's message of a number; 0 and 1 are the handshake's."""
    held = []

    def up(index, message):
        held.append(message)
        return change(held, message) if index == number else [message]

    return up


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _, m: [m[:40] + bytes([m[40] ^ 1]) + m[41:]], "was altered"),
        (lambda _, m: [m[:-1] + bytes([m[-1] ^ 1])], "was altered"),
        (lambda _, m: [m[:1] + bytes([4]) + m[2:]], "was altered"),
        (lambda _, m: [m, m], "repeated"),
        (lambda held, m: [held[2], m], "repeated"),
        (lambda _, m: [], "left out"),
        (lambda _, m: [m[:-1]], "fit"),
        (lambda _, m: [b""], "too short"),
        (lambda _, m: [b"x" * 100], "version"),
    ],
)
def test_what_happens_to_records_ends_their_lane_alone(server, change, words):
    other, other_lane = server.pair(identity=Identity("run", 1, "other"))
    with relaying(server, up=changing(3, change)) as relay:
        client, lane = server.pair(address=relay.address)
        for number in range(4):
            client.send(Kind.STEP, number)
        assert lane.receive(SOON).step == 0
        ended(lane, FrameError, words)
        ended(client, PeerError, "gave up")
        client.close()
    other.send(Kind.STEP, 9)
    assert other_lane.receive(SOON).step == 9
    other.close()


def test_records_of_another_lane_are_noticed(server):
    with relaying(server) as relay:
        client, lane = server.pair(address=relay.address)
        client.send(Kind.STEP, 1)
        lane.receive(SOON)
        foreign = relay.heard[-1]
        client.close()
    with relaying(server, up=changing(2, lambda *_: [foreign])) as relay:
        client, lane = server.pair(address=relay.address)
        client.send(Kind.STEP, 1)
        ended(lane, FrameError, "another lane")
        client.close()


def test_what_comes_back_to_its_sender_is_noticed(server):
    sent = []

    def up(index, message):
        sent.append(message)
        return [message]

    with relaying(server, up=up, down=lambda i, m: [m] if i == 0 else [sent[2]]) as relay:
        client, lane = server.pair(address=relay.address)
        client.send(Kind.STEP, 1)
        lane.receive(SOON)
        lane.send(Kind.STEP, 1)
        ended(client, FrameError, "direction")
        client.close()


@pytest.mark.parametrize("after", [3, 4])
def test_a_stream_that_is_cut_is_noticed(server, after):
    """The frame has two records; the stream ends within it, and right after it."""
    with relaying(server, up=lambda i, m: None if i == after else [m]) as relay:
        client, lane = server.pair(address=relay.address)
        client.send(Kind.HIDDEN, tensors={"hidden": tokens(1, 6000)})
        client.send(Kind.END)
        ended(lane, LaneCutError, "within a frame" if after == 3 else "before it was closed")
        ended(client)
        client.close()


class Proxy:
    """Passes TCP on and counts the bytes."""

    def __init__(self, address):
        host, port = address.split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.up = self.down = 0
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        self._sockets = [near, far]
        threading.Thread(target=self._pump, args=(near, far, "up"), daemon=True).start()
        threading.Thread(target=self._pump, args=(far, near, "down"), daemon=True).start()

    def _pump(self, source, target, name):
        with suppress(OSError):
            while content := source.recv(65536):
                setattr(self, name, getattr(self, name) + len(content))
                target.sendall(content)
        self.cut()

    def cut(self):
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_traffic_is_what_goes_over_tcp(server):
    proxy = Proxy(server.address)
    client, lane = server.pair(address=proxy.address)
    for number in range(8):
        client.send(Kind.HIDDEN, number, tensors={"hidden": tokens(2, 3000)})
        lane.receive(SOON)
        lane.send(Kind.HIDDEN, number, tensors={"hidden": tokens(1, 2000)})
        client.receive(SOON)
    mine, theirs = client.traffic, lane.traffic
    assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
    assert mine.bytes_up == pytest.approx(proxy.up, rel=0.02)
    assert mine.bytes_down == pytest.approx(proxy.down, rel=0.02)
    assert min(mine.seconds_crypto, mine.seconds_serialisation, mine.seconds_waiting) > 0
    client.close()
    proxy.cut()


def test_a_connection_that_breaks_ends_both_ends(server):
    proxy = Proxy(server.address)
    client, lane = server.pair(address=proxy.address)
    client.send(Kind.STEP)
    lane.receive(SOON)
    proxy.cut()
    ended(client, LaneCutError)
    ended(lane, LaneCutError)
    with pytest.raises(LaneCutError):
        client.send(Kind.STEP)
    client.close()


def test_a_wait_has_its_limit_and_the_lane_lives_on(server):
    client, lane = server.pair()
    with pytest.raises(LaneTimeoutError, match=r"0\.1 s"):
        client.receive(0.1)
    lane.send(Kind.WELCOME)
    assert client.receive(SOON).kind is Kind.WELCOME
    client.close()


def test_a_lane_ends_at_its_deadline(server):
    client, lane = server.pair(seconds=1.5)
    ended(client, LaneDeadlineError, "time is over")
    ended(lane, LaneError)


def test_closing_sends_what_is_queued_and_is_told(server):
    client, lane = server.pair()
    for number in range(5):
        client.send(Kind.AVERAGE, number, tensors={"a": torch.zeros(500_000)})
    client.close()
    assert [lane.receive(SOON).step for _ in range(5)] == list(range(5))
    ended(lane, LaneClosedError, "the other side")
    ended(client, LaneClosedError, "this end")
    with pytest.raises(LaneClosedError):
        client.send(Kind.STEP)
    with pytest.raises(LaneClosedError):
        lane.send(Kind.STEP)
    client.close()


def test_closing_while_the_other_side_sends(server):
    client, lane = server.pair()
    for number in range(60):
        lane.send(Kind.AVERAGE, number, tensors={"a": torch.zeros(500_000)})
    client.receive(SOON)
    client.close()
    assert not client._reader.is_alive()
    ended(lane, LaneError)


def test_the_reason_of_an_end_is_told(server):
    client, lane = server.pair()
    lane.close("its time is over")
    ended(client, PeerError, "its time is over")
    ended(lane, LaneClosedError, "its time is over")
    client.close()


def test_what_a_server_fails_with_stays_at_the_server():
    with serving() as server:

        def fail(lane):
            raise ValueError("very private")

        server.server._on_lane = fail
        client = server.client()
        error = ended(client, PeerError, "ValueError")
        assert "private" not in str(error)
        client.close()


def test_a_server_that_stops_says_so():
    with serving() as server:
        opened = threading.Event()

        def wait(lane):
            opened.set()
            lane.receive(SOON)

        server.server._on_lane = wait
        client = server.client()
        assert opened.wait(SOON)
        server.server.stop()
        ended(client, PeerError, "the server has stopped")
        client.close()


def test_numbers_that_are_not_finite_end_the_lane_in_words(server):
    client, lane = server.pair()
    client.send(Kind.HIDDEN, tensors={"hidden": torch.full((1, 1, HIDDEN), float("nan"))})
    ended(client, FrameError, "'hidden' has NaN")
    ended(lane, PeerError)
    client.close()


def test_what_a_lane_does_not_allow_is_said_at_once_and_the_lane_lives_on(server):
    client, lane = server.pair()
    with pytest.raises(FrameError, match="same base model"):
        client.send(Kind.HIDDEN, tensors={"hidden": torch.zeros(1, 1, HIDDEN + 1)})
    client.send(Kind.STEP)
    lane.receive(SOON)
    client.close()


def test_the_server_does_not_rely_on_the_clients_limits(server):
    client, lane = server.pair(limits=Limits(HIDDEN, "float32", 10**6))
    client.send(Kind.HIDDEN, tensors={"hidden": tokens(1, 70_000)})
    ended(lane, FrameError, "agreed on are at most")
    ended(client, PeerError)
    client.close()


def test_a_receiver_that_does_not_receive_holds_the_sender_back(server):
    client, lane = server.pair()
    for number in range(60):
        client.send(Kind.AVERAGE, number, tensors={"a": torch.zeros(500_000)})
    lane.receive(SOON)
    time.sleep(0.5)
    assert len(lane._incoming) <= lane_end._FRAMES_AHEAD
    assert client._outgoing
    assert [lane.receive(SOON).step for _ in range(59)] == list(range(1, 60))
    client.close()


def test_lanes_have_a_number(server):
    with serving(maximum_lanes=1) as full:
        first, _ = full.pair()
        ticket = full.ticket()
        assert isinstance(refusal(lambda: full.client(ticket=ticket)), LaneBusyError)
        first.close()
        full.done.set()
        for _ in range(100):
            if not full.server._threads:
                break
            time.sleep(0.05)
        full.client(ticket=ticket).close()


@pytest.mark.parametrize("size", [0, 1, 5000, 2**20 + 100])
def test_strangers_bytes_are_refused(server, size):
    with closing(grpc.insecure_channel(server.address)) as channel:
        method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as raised:
            list(method(iter([b"C" * size]), timeout=SOON))
        assert raised.value.code() in {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
    server.client().close()


def test_an_unknown_suite_is_named(server):
    with pytest.raises(HandshakeError, match=r"split\.key-exchange"):
        connect(server.address, server.ticket(), COURT, b"", "rot13", LIMITS, time.monotonic() + 1)


def test_a_port_in_use_is_an_error_in_words(server):
    with pytest.raises(OSError, match=r"port is in use.*split\.listen"):
        LaneServer(server.address, server.keys, server.book, lambda _: LIMITS, server.on_lane, 1)


def test_an_address_without_a_server_is_an_error_in_words(server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(LaneCutError, match=r"can't be reached.*split\.advertise"):
        server.client(address=address)


def test_an_address_that_is_silent_is_an_error_in_words(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LaneTimeoutError):
            server.client(address=address, seconds=1.0)
    with pytest.raises(LaneTimeoutError):
        server.client(seconds=-1)


def forms(secret):
    yield secret.hex()
    yield base64.b64encode(secret).decode().rstrip("=")
    yield repr(secret)[2:-1]


def test_nothing_secret_is_logged_or_shown(server, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    ticket = server.ticket()
    client, lane = server.pair(ticket=ticket)
    hidden = tokens(1, 4)
    client.send(Kind.HIDDEN, tensors={"hidden": hidden})
    frame = lane.receive(SOON)
    shown = [repr([client, lane, frame, ticket, server.keys, server.book, client.resumption])]
    client.send(Kind.HIDDEN, tensors={"hidden": hidden / 0})
    shown.append(repr(ended(client)) + repr(ended(lane)))
    client.close()
    with pytest.raises(TicketError) as raised:
        server.client(ticket=ticket)
    shown.append(repr(raised.value))
    text = caplog.text + "".join(shown) + "".join(capfd.readouterr())
    assert "court" in text
    keys = [ticket.secret, client.resumption.secret]
    for secret in keys:
        assert all(form not in text for form in forms(secret))
    for number in hidden.flatten().tolist():
        assert f"{number:.4f}" not in text
