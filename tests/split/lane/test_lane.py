"""Frames, limits, byte counts and secrets of a lane."""

import base64
import gc
import logging
import threading
import time

import pytest
import torch

from split.lane.stream import Stream
from split.protocol.errors import (
    FrameError,
    HandshakeError,
    LaneBacklogError,
    LaneTimeoutError,
    PeerError,
    Refusal,
)
from split.protocol.frames import Kind, Limits
from tests.split.lanes import (
    HIDDEN,
    SOON,
    Proxy,
    ended,
    refusal,
    serving,
    tokens,
)
from tests.waiting import wait_until


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


def test_a_wait_has_its_limit_and_leaves_the_lane_open(server):
    client, lane = server.pair()
    with pytest.raises(LaneTimeoutError, match=r"0\.1 s"):
        client.receive(0.1)
    lane.send(Kind.WELCOME)
    assert client.receive(SOON).kind is Kind.WELCOME
    client.close()


def test_numbers_that_are_not_finite_end_the_lane_in_words(server):
    client, lane = server.pair()
    client.send(Kind.HIDDEN, tensors={"hidden": torch.full((1, 1, HIDDEN), float("nan"))})
    ended(client, FrameError, "'hidden' contains NaN")
    ended(lane, PeerError)
    client.close()


def test_a_frame_that_is_not_allowed_leaves_the_lane_open(server):
    client, lane = server.pair()
    with pytest.raises(FrameError, match="same base model"):
        client.send(Kind.HIDDEN, tensors={"hidden": torch.zeros(1, 1, HIDDEN + 1)})
    client.send(Kind.STEP)
    lane.receive(SOON)
    client.close()


def test_the_server_does_not_rely_on_the_clients_limits(server):
    client, lane = server.pair(limits=Limits(HIDDEN, "float32", 10**6))
    client.send(Kind.HIDDEN, tensors={"hidden": tokens(1, 70_000)})
    ended(lane, FrameError, "were agreed on")
    ended(client, PeerError)
    client.close()


def test_a_receiver_that_does_not_receive_holds_the_client_back():
    """Frames that come early are weighed, and the client waits; the order stays."""
    limits = Limits(HIDDEN, "float32", 1000, average_bytes=2**21, window=1)
    with serving(limits=limits) as server:
        client, lane = server.pair(limits=limits)
        sent = []

        def send():
            for number in range(60):
                client.send(Kind.AVERAGE, number, tensors={"a": torch.zeros(500_000)})
                sent.append(number)

        sender = threading.Thread(target=send)
        sender.start()
        lane.receive(SOON)
        time.sleep(0.5)
        # One was received, one lies ready, and one waits.
        assert lane.traffic.bytes_up < 4 * 2**21 and len(sent) < 30
        assert [lane.receive(SOON).step for _ in range(59)] == list(range(1, 60))
        sender.join()
        client.close()


def test_frames_without_tensors_are_weighed_too(server):
    """A receiver that waits for something else holds few of them, whatever their fields hold."""
    client, lane = server.pair()
    fields = {str(number): "x" * 4000 for number in range(15)}
    for number in range(300):
        client.send(Kind.STEP, number, fields=fields)
    time.sleep(1.0)
    assert 0 < lane.traffic.bytes_up <= (16 + 2) * 2**16
    lane.close("enough")
    client.close()


def test_streams_of_an_ended_lane_are_freed(server):
    before = {id(o) for o in gc.get_objects() if type(o) is Stream}
    for _ in range(8):
        client, lane = server.pair()
        client.send(Kind.STEP)
        lane.receive(SOON)
        client.close()
    del client
    server.done.set()

    def kept():
        gc.collect()
        return [o for o in gc.get_objects() if type(o) is Stream and id(o) not in before]

    wait_until(lambda: len(kept()) <= 1, seen=kept)  # the last one may still be ending


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_a_client_that_does_not_read_loses_its_lane(wire):
    """The bound is one of memory, whatever the tensors take on the wire; what is honest fits."""
    limits = Limits(HIDDEN, wire, 1000, average_bytes=2**21, window=1)
    answer = tokens(1, 1000)
    with serving(limits=limits) as server:
        client, lane = server.pair(limits=limits)
        lane.send(Kind.AVERAGE, tensors={"a": torch.zeros(500_000)})
        kept = 4 * 500_000
        for number in range(2 * (limits.window + 1)):
            lane.send(Kind.HIDDEN, number, tensors={"hidden": answer})
            kept += answer.nbytes
        with pytest.raises(LaneBacklogError, match=r"has not acknowledged \d+ bytes"):
            while True:
                lane.send(Kind.HIDDEN, tensors={"hidden": answer})
                kept += answer.nbytes
        assert kept <= limits.queue_bytes
        ended(client, PeerError, "left too many frames unacknowledged")
        client.close()


def test_lanes_have_a_number(server):
    with serving(max_lanes=1) as full:
        first, _ = full.pair()
        ticket = full.ticket()
        assert refusal(lambda: full.client(ticket=ticket)).refusal is Refusal.BUSY
        first.close()
        full.done.set()
        full.client(ticket=ticket, patience=SOON).close()


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
    resumption = client.stream.resumption
    shown = [repr([client, lane, frame, ticket, server.keys, client.stream, resumption])]
    client.send(Kind.HIDDEN, tensors={"hidden": hidden / 0})
    shown.append(repr(ended(client)) + repr(ended(lane)))
    client.close()
    with pytest.raises(HandshakeError, match="used") as raised:
        server.client(ticket=ticket)
    shown.append(repr(raised.value))
    text = caplog.text + "".join(shown) + "".join(capfd.readouterr())
    assert "court" in text
    keys = [ticket.secret, resumption.secret]
    for secret in keys:
        assert all(form not in text for form in forms(secret))
    for number in hidden.flatten().tolist():
        assert f"{number:.4f}" not in text


def test_messages_of_peers_are_shown_escaped(server, caplog):
    """A client that doesn't escape what it says can't break a line, a terminal or a file."""
    caplog.set_level(logging.DEBUG)
    client, lane = server.pair()
    words = "lone \ud800\n\x1b[31mred \u202e" + "x" * 3000
    client.send(Kind.ERROR, fields={"message": words})
    error = ended(lane, PeerError)
    assert str(error).isprintable() and len(str(error)) < 1100
    assert r"lone \ud800\n\x1b[31mred \u202e" in str(error)
    assert "red" in caplog.text and "\ud800" not in caplog.text and "\x1b" not in caplog.text
    client.close()
