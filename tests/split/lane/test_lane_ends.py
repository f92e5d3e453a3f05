"""How lanes end, and how both sides learn of it."""

import socket
import threading

import pytest
import torch

from split.lane.listening import LaneServer
from split.protocol.errors import (
    LaneClosedError,
    LaneCutError,
    LaneDeadlineError,
    LaneError,
    LaneTimeoutError,
    LaneUnreachableError,
    PeerError,
)
from split.protocol.frames import Kind
from tests.split.lanes import LIMITS, SOON, Proxy, ended, serving


def test_a_broken_connection_that_is_not_replaced_ends_both_ends():
    with serving(resume_timeout=1.0) as server:
        proxy = Proxy(server.address)
        client, lane = server.pair(address=proxy.address, resume_timeout=1.0)
        client.send(Kind.STEP)
        lane.receive(SOON)
        proxy.stop()
        ended(client, LaneCutError, "could not be resumed")
        ended(lane, LaneCutError, r"split\.resume-timeout")
        with pytest.raises(LaneCutError):
            client.send(Kind.STEP)
        client.close()


def test_a_lane_ends_at_its_deadline(server):
    client, _ = server.pair(seconds=1.5)
    ended(client, LaneDeadlineError, "deadline has passed")


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
    assert client.over.is_set()
    ended(lane, LaneError)


def test_both_ends_report_why_the_lane_was_closed(server):
    client, lane = server.pair()
    lane.close("its time is over")
    ended(client, PeerError, "its time is over")
    ended(lane, LaneClosedError, "its time is over")
    client.close()


def test_what_a_server_fails_with_stays_at_the_server():
    def fail(lane):
        raise ValueError("very private")

    with serving(on_lane=fail) as server:
        client = server.client()
        error = ended(client, PeerError, "ValueError")
        assert "private" not in str(error)
        client.close()


def test_a_server_that_stops_says_so():
    opened = threading.Event()

    def wait(lane):
        opened.set()
        lane.receive(SOON)

    with serving(on_lane=wait) as server:
        client = server.client()
        assert opened.wait(SOON)
        server.server.stop()
        ended(client, PeerError, "the server has stopped")
        client.close()


def test_a_port_in_use_is_an_error_in_words(server):
    with pytest.raises(OSError, match=r"port is in use.*split\.listen"):
        LaneServer(server.address, server.keys, LIMITS, server.on_lane, 1)


def test_an_address_without_a_server_is_an_error_in_words(server):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(LaneUnreachableError, match=r"can't be reached.*split\.advertise"):
        server.client(address=address)


def test_an_address_that_is_silent_is_an_error_in_words(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LaneTimeoutError):
            server.client(address=address, seconds=1.0)
    with pytest.raises(LaneTimeoutError):
        server.client(seconds=-1)
