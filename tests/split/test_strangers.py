"""Whoever can reach the port, and clients who mean harm, take nothing from the others."""

import queue
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import grpc
import pytest
import torch

from client_app import split as client_side
from split import lane_server, lane_transport
from split.client import ClientRound
from split.frames import Kind
from split.half_open import AnsweredHandshakes, SilentStreams, host_of
from split.handshake import ClientHandshake
from split.invitation import Invitation
from split.lane import LaneBusyError, LaneCutError, PeerError
from split.lane_errors import LaneError
from split.lane_transport import METHOD, SERVICE, channel_options
from split.tickets import Identity
from tests.split.clients import SIZES, Client, serving, split_settings, train_together
from tests.split.lanes import COURT, LIMITS, SOON, Proxy, ended
from tests.split.lanes import serving as serving_lanes

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Stream:
    """A stream of a stranger, who sends what a test says."""

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
def strangers(server, count, *messages):
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


def seconds_until_closed(made):
    started = time.monotonic()
    with suppress(ConnectionError):
        while made.recv(65536):
            pass
    return time.monotonic() - started


def until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def server():
    with serving_lanes() as made:
        yield made


@pytest.fixture
def hurried(monkeypatch):
    """Limits of time that a test can wait for."""
    for module in (lane_server, lane_transport):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(lane_server, "HANDSHAKE_SECONDS", 1.0)
    with serving_lanes() as made:
        yield made


def test_silent_streams_make_room_for_who_has_something_to_say(server):
    with strangers(server, 2 * lane_server._HALF_OPEN) as silent:
        until(lambda: len(server.server._silent._streams) == lane_server._HALF_OPEN)
        for _ in range(3):
            client, _ = server.pair()
            client.close()
        ended_early = [stream.call.done() for stream in silent]
        assert sum(ended_early) >= lane_server._HALF_OPEN
        # Those who lost their place are told that there is none: an honest client would try again.
        assert silent[0].refusal()[0] is grpc.StatusCode.CANCELLED
    until(lambda: not server.server._silent._streams)


def test_a_stream_may_not_be_silent_for_long(hurried):
    with strangers(hurried, 1) as (stream,):
        started = time.monotonic()
        assert stream.refusal()[0] is grpc.StatusCode.CANCELLED
        assert time.monotonic() - started < 5


def test_who_loses_its_place_is_of_the_address_that_has_most():
    places, ended_streams = SilentStreams(4, SOON), []
    with ExitStack() as stack:

        def come(host, number):
            stack.enter_context(places.place(host, lambda: ended_streams.append((host, number))))

        come("honest", 0)
        for number in range(20):
            come("flood", number)
        assert ended_streams == [("flood", number) for number in range(17)]
        come("other", 0)
        assert ended_streams[-1] == ("flood", 17)
    assert not places._streams


def test_addresses_are_told_apart_by_host_and_ipv6_network():
    assert host_of("ipv4:10.0.0.1:4711") == host_of("ipv4:10.0.0.1:4712") == "10.0.0.1"
    assert host_of("ipv6:%5B2001:db8::1%5D:1") == host_of("ipv6:[2001:db8::ffff]:2")
    assert host_of("ipv6:%5B2001:db8::1%5D:1") != host_of("ipv6:%5B2001:db8:0:1::1%5D:1")
    assert host_of("unix:") == host_of("unix:")


def test_a_message_that_was_heard_is_answered_once_and_its_ticket_stays_good(server):
    ticket = server.ticket()
    hello = ClientHandshake(ticket, COURT, server.keys.public, server.keys.suite).hello()
    with strangers(server, 40, hello) as replayers:
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


def test_a_ticket_holds_few_places_and_not_for_long(hurried):
    ticket = hurried.ticket()
    with ExitStack() as stack:

        def begin():
            handshake = ClientHandshake(ticket, COURT, hurried.keys.public, hurried.keys.suite)
            return stack.enter_context(closing(Stream(hurried.address, handshake.hello())))

        held = [begin() for _ in range(lane_server._OF_ONE_IDENTITY)]
        for stream in held:
            stream.answer()
        assert begin().refusal()[1] == "chambers: busy"
        hurried.client(identity=Identity("run", 1, "other")).close()
        for stream in held:  # the third message doesn't come
            assert stream.refusal()[0] is grpc.StatusCode.CANCELLED
        hurried.client(ticket=ticket).close()


def test_all_places_of_answered_handshakes_are_bounded():
    places = AnsweredHandshakes(2, 1, SOON)
    one, two, three = (Identity("run", 1, name) for name in "abc")
    with places.place(one, int), places.place(two, int):
        for identity in (one, three):
            with pytest.raises(LaneBusyError), places.place(identity, int):
                pass
    with places.place(three, int):
        pass
    assert not places._taken


def test_a_wrong_proof_takes_no_place_and_is_hardly_logged(server, caplog):
    caplog.set_level("INFO")
    ticket = server.ticket()
    hello = ClientHandshake(ticket, COURT, server.keys.public, server.keys.suite).hello()
    wrong = hello[:-1] + bytes([hello[-1] ^ 1])
    with strangers(server, 30, wrong) as streams:
        for stream in streams:
            assert stream.refusal()[1] == "chambers: authentication"
        assert not server.server._answered._taken
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
        # Headers of which the end doesn't come.
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


def test_connections_have_a_number_and_clients_come_again(monkeypatch):
    monkeypatch.setattr(lane_transport, "_SPARE_CONNECTIONS", 3)
    monkeypatch.setattr(lane_server, "_HALF_OPEN", 1)
    monkeypatch.setattr(lane_transport, "SILENT_SECONDS", 1.5)
    with serving_lanes(maximum_lanes=1) as server, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connection(server))
        time.sleep(0.3)
        with pytest.raises(LaneCutError):
            server.client()
        invitation = Invitation(
            server.address, server.keys.suite, server.keys.public, COURT, server.ticket()
        )
        lane = client_side.open_lane(invitation, LIMITS, time.monotonic() + SOON)
        lane.close()


def test_an_oversized_message_ends_its_lane_alone(server):
    other, other_lane = server.pair(identity=Identity("run", 1, "other"))
    ticket = server.ticket()
    handshake = ClientHandshake(ticket, COURT, server.keys.public, server.keys.suite)
    with strangers(server, 1, handshake.hello()) as (stream,):
        finished, _ = handshake.finish(stream.answer())
        stream.messages.put(finished)
        lane = server.lanes.get(timeout=SOON)
        stream.messages.put(bytes(2**20 + 100))
        ended(lane, LaneError)
    other.send(Kind.JOIN)
    assert other_lane.receive(SOON).kind is Kind.JOIN
    other.close()


class Dribble(Proxy):
    """Passes what goes up on a byte at a time, once it is told to."""

    slow = False

    def _pump(self, source, target, name):
        with suppress(OSError):
            while content := source.recv(65536):
                if name == "up" and self.slow:
                    for byte in content:
                        target.sendall(bytes([byte]))
                        time.sleep(0.05)
                else:
                    target.sendall(content)
        self.cut()


def test_a_frame_that_comes_a_byte_at_a_time_is_cut_by_the_frame_timeout(base, beginning):
    split = split_settings(frame_timeout=1.0)
    client = Client("alpha", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        proxy = Dribble(server.address)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        with client.lane(replace(invitation, address=proxy.address)) as model:
            model.join(ClientRound(3, 0, 3, 16, 0, time.monotonic() + SOON))
            proxy.slow = True
            model.lane.present.send(Kind.HIDDEN, 0, 0, {"hidden": torch.zeros(2, 8, 32)})
            ended(model.lane.present, PeerError, r"split\.frame-timeout")
            proxy.cut()
        assert "split.frame-timeout" in server.finish_lanes()[0].error


def spoil(change):
    """Give what makes a client's frames what ``change`` makes of their numbers."""

    def disturb(model):
        send = model.lane.present.send

        def sending(kind, step=0, micro_batch=0, tensors=None, fields=None):
            send(kind, step, micro_batch, *change(kind, tensors or {}, fields or {}))

        model.lane.present.send = sending

    return disturb


def huge(kind_changed, value):
    def change(kind, tensors, fields):
        if kind is kind_changed:
            tensors = {
                n: torch.full_like(t, value) if t.is_floating_point() else t
                for n, t in tensors.items()
            }
        return tensors, fields

    return spoil(change)


def huge_norm(kind, tensors, fields):
    return tensors, fields | ({"squared_norm": 1e308} if kind is Kind.STEP else {})


SPOILT = {
    "huge hidden states": (huge(Kind.HIDDEN, 3e38), "beyond 2³⁰"),
    "huge gradients": (huge(Kind.GRADIENT, -3e38), "beyond 2³⁰"),
    "a huge norm": (spoil(huge_norm), "squared_norm"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_numbers_that_could_spoil_the_stack_end_their_lane_alone(base, beginning, what):
    """Without limits the stack's gradients would be NaN, and all its lanes would end."""
    disturb, reason = SPOILT[what]
    split = split_settings(schedule="client-batch")
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        steps = dict.fromkeys(SIZES, 3)
        trained = train_together(clients, server, beginning, steps, disturbing={"beta": disturb})
        accounts = {account.client: account for account in server.finish_lanes()}
        assert all(v.isfinite().all() for v in server.end_round(SIZES).values())
    assert set(trained) == {"alpha", "gamma"}
    assert reason in accounts["beta"].error
    assert not accounts["alpha"].error and not accounts["gamma"].error


def test_the_largest_numbers_that_may_come_leave_the_stack_finite(base, beginning):
    split = split_settings(schedule="client-batch")
    clients = [Client(name, base, split) for name in SIZES]

    def disturb(model):
        huge(Kind.HIDDEN, 2.0**30)(model)
        huge(Kind.GRADIENT, 2.0**30)(model)

    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        steps = dict.fromkeys(SIZES, 3)
        trained = train_together(clients, server, beginning, steps, disturbing={"beta": disturb})
        accounts = {account.client: account for account in server.finish_lanes()}
        assert all(v.isfinite().all() for v in server.end_round(SIZES).values())
    assert {"alpha", "gamma"} <= set(trained)
    assert not accounts["alpha"].error and not accounts["gamma"].error


def test_nothing_is_left_of_a_flood(server):
    def flood():
        hello = ClientHandshake(
            server.ticket(lifetime=0), COURT, server.keys.public, server.keys.suite
        ).hello()
        with strangers(server, 40), strangers(server, 40, hello), strangers(server, 20, b"CHLN"):
            time.sleep(0.5)

    before = threading.active_count()
    flood()
    until(lambda: not server.server._silent._streams)
    until(lambda: threading.active_count() <= before)
    assert not server.server._answered._taken
    server.client().close()
