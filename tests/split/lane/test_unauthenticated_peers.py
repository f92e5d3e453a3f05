"""Peers without a ticket that can reach the port don't affect clients."""

import queue
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import pytest

from split.lane.half_open import AnsweredHandshakes, SilentStreams, host_of
from split.lane.transport import METHOD, SERVICE, PeerLimits, channel_options
from split.protocol.errors import HandshakeError, LaneUnreachableError
from split.protocol.frames import Kind
from split.protocol.handshake import ClientHandshake
from split.protocol.keys import ServerKeys
from split.protocol.tickets import Identity
from tests.split.lanes import COURT, HYBRID, SOON, relaying
from tests.split.lanes import serving as serving_lanes
from tests.waiting import wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# Limits of time that a test can wait for.
HURRIED = PeerLimits(handshake_seconds=1.0, silent_seconds=0.5)


class Stream:
    """A stream of an outsider that sends the messages that a test specifies."""

    def __init__(self, address, *messages):
        self.channel = grpc.insecure_channel(address, options=channel_options(address))
        self.messages = queue.SimpleQueue()
        for message in messages:
            self.messages.put(message)
        method = self.channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.call = method(iter(self.messages.get, None), timeout=SOON)

    def answer(self):
        return next(self.call)

    def refusal(self):
        with pytest.raises(grpc.RpcError) as raised:
            next(self.call)
        return raised.value.code(), raised.value.details()

    def close(self):
        self.messages.put(None)
        self.call.cancel()
        self.channel.close()


@contextmanager
def outsiders(server, count, *messages):
    with ExitStack() as stack:
        yield [
            stack.enter_context(closing(Stream(server.address, *messages))) for _ in range(count)
        ]


def connection(server, *sent):
    host, port = server.address.split(":")
    made = socket.create_connection((host, int(port)), timeout=SOON)
    for content in sent:
        made.sendall(content)
    return made


def is_closed(made):
    """Return whether the server has closed a connection without sending anything."""
    try:
        return made.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def seconds_until_closed(made):
    started = time.monotonic()
    with suppress(ConnectionError):
        while made.recv(65536):
            pass
    return time.monotonic() - started


@pytest.fixture
def server():
    with serving_lanes() as made:
        yield made


@pytest.fixture
def hurried():
    with serving_lanes(peers=HURRIED) as made:
        yield made


def test_silent_streams_make_room_for_who_has_something_to_say(server):
    most = PeerLimits().half_open
    with outsiders(server, 2 * most) as silent:
        wait_until(lambda: sum(each.call.done() for each in silent) >= most)
        for _ in range(3):
            client, _ = server.pair()
            client.close()
        # Displaced streams are told that there is no room: an honest client would try again.
        assert silent[0].refusal()[0] is grpc.StatusCode.CANCELLED


def test_a_stream_may_not_be_silent_for_long(hurried):
    with outsiders(hurried, 1) as (stream,):
        started = time.monotonic()
        assert stream.refusal()[0] is grpc.StatusCode.CANCELLED
        assert time.monotonic() - started < 5


def test_the_address_with_the_most_streams_loses_one():
    silent, ended_streams = SilentStreams(4, SOON), []
    with ExitStack() as stack:

        def come(host, number):
            stack.enter_context(silent.count(host, lambda: ended_streams.append((host, number))))

        come("honest", 0)
        for number in range(20):
            come("flood", number)
        assert ended_streams == [("flood", number) for number in range(17)]
        come("other", 0)
        assert ended_streams[-1] == ("flood", 17)
        ended_streams.clear()
        stack.close()
        for number in range(4):
            come("another", number)
        assert not ended_streams


def test_addresses_are_told_apart_by_host_and_ipv6_network():
    assert host_of("ipv4:10.0.0.1:4711") == host_of("ipv4:10.0.0.1:4712") == "10.0.0.1"
    assert host_of("ipv6:%5B2001:db8::1%5D:1") == host_of("ipv6:[2001:db8::ffff]:2")
    assert host_of("ipv6:%5B2001:db8::1%5D:1") != host_of("ipv6:%5B2001:db8:0:1::1%5D:1")
    assert host_of("unix:") == host_of("unix:")


def test_a_replayed_message_is_answered_once(server):
    ticket = server.ticket()
    hello = ClientHandshake(ticket, COURT, server.keys.public, server.keys.suite).hello()
    with outsiders(server, 40, hello) as replayers:
        answered = 0
        for stream in replayers:
            try:
                stream.answer()
                answered += 1
            except grpc.RpcError as error:
                assert error.details() == "chambers: busy"
        assert answered == 1
        client, lane = server.pair(ticket=ticket)
        client.send(Kind.JOIN)
        assert lane.receive(SOON).kind is Kind.JOIN
        client.close()


class CountingKeys(ServerKeys):
    """Counts the secrets that are decrypted."""

    unwrapped = 0

    def unwrap(self, *arguments):
        self.unwrapped += 1
        return super().unwrap(*arguments)


def test_a_ticket_has_few_handshakes_and_not_for_long():
    """Nor does it cost public-key work beyond them."""
    keys = CountingKeys(HYBRID)
    with serving_lanes(keys=keys, peers=HURRIED) as server, ExitStack() as stack:
        ticket = server.ticket()

        def begin():
            handshake = ClientHandshake(ticket, COURT, keys.public, keys.suite)
            return stack.enter_context(closing(Stream(server.address, handshake.hello())))

        held = [begin() for _ in range(HURRIED.of_one_identity)]
        for stream in held:
            stream.answer()
        assert begin().refusal()[1] == "chambers: busy"
        assert keys.unwrapped == len(held)
        server.client(identity=Identity("run", 1, "other")).close()
        for stream in held:  # the third message doesn't come
            assert stream.refusal()[0] is grpc.StatusCode.CANCELLED
        server.client(ticket=ticket).close()


def test_the_number_of_answered_handshakes_is_bounded():
    handshakes = AnsweredHandshakes(2, 1, SOON)
    one, two, three = (Identity("run", 1, name) for name in "abc")
    with handshakes.count(one, int), handshakes.count(two, int):
        for identity in (one, three):
            with pytest.raises(HandshakeError, match="no more"), handshakes.count(identity, int):
                pass
    for _ in range(3):
        with handshakes.count(three, int), handshakes.count(one, int):
            pass


def test_a_wrong_proof_takes_no_room_and_is_hardly_logged(server, caplog):
    caplog.set_level("INFO")
    ticket = server.ticket()
    hello = ClientHandshake(ticket, COURT, server.keys.public, server.keys.suite).hello()
    wrong = hello[:-1] + bytes([hello[-1] ^ 1])
    with outsiders(server, 30, wrong) as streams:
        for stream in streams:
            assert stream.refusal()[1] == "chambers: authentication"
    assert sum("handshakes refused" in line for line in caplog.messages) == 1
    server.client(ticket=ticket).close()


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [bytes(range(256)) * 100],
        [PREFACE],
        [PREFACE, SETTINGS],
        [PREFACE, SETTINGS, b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100)],
        # Headers without an end.
        [PREFACE, SETTINGS, b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82"],
    ],
    ids=["nothing", "http/1", "noise", "preface", "settings", "too large", "half a header"],
)
def test_connections_that_are_no_clients_are_closed(hurried, sent):
    with connection(hurried, *sent) as made:
        assert seconds_until_closed(made) < 5
    hurried.client().close()


def test_a_byte_at_a_time_is_no_way_to_stay(hurried):
    with connection(hurried) as made:
        started = time.monotonic()
        with suppress(ConnectionError, BrokenPipeError):
            for byte in PREFACE + SETTINGS * 100:
                made.sendall(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() - started < 5
    hurried.client().close()


def test_connections_have_a_number_and_clients_come_again():
    # Time enough to come 20 times, and to be refused.
    peers = PeerLimits(spare_connections=3, half_open=1, silent_seconds=5.0)
    with serving_lanes(max_lanes=1, peers=peers) as server, ExitStack() as stack:
        made = [stack.enter_context(connection(server)) for _ in range(20)]
        calls = 1 + 3 * peers.half_open
        wait_until(lambda: sum(map(is_closed, made)) >= 20 - (calls + 3))
        with pytest.raises(LaneUnreachableError):
            server.client()
        server.client(patience=SOON).close()


def test_an_oversized_message_costs_its_sender_a_stream(server):
    once = [bytes(2**20 + 100)]

    def up(index, message):
        return [once.pop()] if index == 3 and once else [message]

    other, other_lane = server.pair(identity=Identity("run", 1, "other"))
    with relaying(server, up=up) as relay:
        client, lane = server.pair(address=relay.address)
        client.send(Kind.JOIN)
        assert lane.receive(SOON).kind is Kind.JOIN
        assert lane.opened == 2
        client.close()
    other.send(Kind.JOIN)
    assert other_lane.receive(SOON).kind is Kind.JOIN
    assert other_lane.opened == 1
    other.close()


def test_compressed_messages_are_not_expanded(server):
    with closing(grpc.insecure_channel(server.address)) as channel:
        method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        bomb = method(iter([bytes(2**27)]), timeout=SOON, compression=grpc.Compression.Gzip)
        with pytest.raises(grpc.RpcError) as raised:
            next(bomb)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    server.client().close()


def test_an_unconfirmed_client_holds_a_place_and_no_lane(hurried):
    """Its ticket stays good: nothing that it sent shows that it has the server's confirmation."""
    ticket = hurried.ticket()
    handshake = ClientHandshake(ticket, COURT, hurried.keys.public, hurried.keys.suite)
    with outsiders(hurried, 1, handshake.hello()) as (stream,):
        finished, _ = handshake.finish(stream.answer())
        stream.messages.put(finished)
        stream.answer()
        assert stream.refusal()[0] is grpc.StatusCode.CANCELLED
        assert hurried.lanes.empty()
    hurried.client(ticket=ticket).close()


def test_nothing_is_left_of_a_flood(server):
    def flood():
        hello = ClientHandshake(
            server.ticket(lifetime=0), COURT, server.keys.public, server.keys.suite
        ).hello()
        with outsiders(server, 40), outsiders(server, 40, hello), outsiders(server, 20, b"CHLN"):
            time.sleep(0.5)

    before = threading.active_count()
    flood()
    wait_until(lambda: threading.active_count() <= before)  # each stream that holds a place has one
    server.client().close()
