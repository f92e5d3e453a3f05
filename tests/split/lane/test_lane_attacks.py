"""Altered messages, replayed records, eavesdroppers and outsiders."""

import queue
import threading
from contextlib import closing

import grpc
import pytest

from split.lane.transport import METHOD, SERVICE, PeerLimits
from split.protocol.errors import (
    HandshakeError,
    LaneCutError,
    LaneError,
    LaneTimeoutError,
    LaneUnreachableError,
)
from split.protocol.frames import Kind
from tests.split.lanes import (
    SOON,
    changing,
    ended,
    relaying,
    serving,
)


def test_of_two_lanes_with_one_ticket_one_comes_about(server):
    ticket = server.ticket()
    outcomes = queue.SimpleQueue()

    def open_one():
        try:
            lane = server.client(ticket=ticket, resume_timeout=0.0)
            lane.send(Kind.JOIN)
            lane.receive(2.0)
        except LaneTimeoutError:
            outcomes.put("open")
            lane.close()
        except (HandshakeError, LaneCutError, LaneUnreachableError):
            outcomes.put("refused")

    threads = [threading.Thread(target=open_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert sorted(outcomes.get(timeout=1) for _ in threads) == ["open", "refused", "refused"]


# protocol/test_records.py tests all bytes, other orders, and records of other lanes.
CHANGES = {
    "a bit of the tag": lambda _, m: [m[:-1] + bytes([m[-1] ^ 1])],
    "an unknown kind": lambda _, m: [m[:1] + bytes([200]) + m[2:]],
    "the length of the frame": lambda _, m: [m[:24] + bytes([255]) * 8 + m[32:]],
    "sent twice": lambda _, m: [m, m],
    "left out": lambda _, m: [],
    "nothing": lambda _, m: [b""],
}


def once(change):
    """Return a function that applies ``change`` only once, not in later streams."""
    left = [change]
    return lambda held, message: left.pop()(held, message) if left else [message]


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_record_up_costs_a_stream_and_no_frame(server, what):
    with relaying(server, up=changing(4, once(CHANGES[what]))) as relay:
        client, lane = server.pair(address=relay.address)
        for number in range(4):
            client.send(Kind.STEP, number)
        assert [lane.receive(SOON).step for _ in range(4)] == list(range(4))
        lane.send(Kind.STEP, 9)
        assert client.receive(SOON).step == 9
        assert client.opened == lane.opened == 2
        client.close()


def test_a_changed_record_down_costs_a_stream_and_no_frame(server):
    change = once(CHANGES["a bit of the tag"])
    with relaying(server, down=changing(2, change)) as relay:
        client, lane = server.pair(address=relay.address)
        for number in range(4):
            lane.send(Kind.STEP, number)
        assert [client.receive(SOON).step for _ in range(4)] == list(range(4))
        assert client.opened == lane.opened == 2
        client.close()


def test_altering_every_stream_ends_the_lane():
    with (
        serving(peers=PeerLimits(max_streams=3)) as server,
        relaying(server, up=changing(3, CHANGES["a bit of the tag"])) as relay,
    ):
        client, lane = server.pair(address=relay.address)
        client.send(Kind.STEP)
        ended(lane, LaneError, "cut 3 times")
        ended(client, LaneError, "cut 3 times")
        client.close()


@pytest.mark.parametrize("size", [0, 1, 5000, 2**20 + 100])
def test_outsiders_bytes_are_refused(server, size):
    with closing(grpc.insecure_channel(server.address)) as channel:
        method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as raised:
            list(method(iter([b"C" * size]), timeout=SOON))
        assert raised.value.code() in {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        }
    server.client().close()
