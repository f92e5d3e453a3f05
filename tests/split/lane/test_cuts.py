"""A lane survives cuts: every frame arrives once and in order, wherever the network is cut."""

import threading
from contextlib import closing

import pytest
import torch

from split.protocol.errors import (
    FrameError,
    HandshakeError,
    LaneCutError,
    LaneTimeoutError,
    PeerError,
    Refusal,
)
from split.protocol.frames import Kind
from tests.split.hostile import Member, end_of_step
from tests.split.lanes import SOON, ForgedError, Proxy, cut, ended, relaying, serving

FRAMES = 4


def cutting(numbers):
    """Cut the first streams, each before the message with a number; don't cut later streams."""
    streams_left = list(numbers)
    present = []

    def change(index, message):
        if index == 0:
            present[:] = [streams_left.pop(0)] if streams_left else [None]
        return None if index == present[0] else [message]

    return change


def exchange(client, lane):
    """Send frames longer than a record in both directions; check that they arrive."""

    def answer():
        for number in range(FRAMES):
            assert lane.receive(SOON).step == number
            lane.send(Kind.AVERAGE, number, tensors={"a": torch.full((300_000,), float(number))})

    server_side = threading.Thread(target=answer)
    server_side.start()
    for number in range(FRAMES):
        client.send(Kind.AVERAGE, number, tensors={"a": torch.full((300_000,), float(number))})
    for number in range(FRAMES):
        frame = client.receive(SOON)
        assert (frame.step, frame.tensors["a"][-1]) == (number, number)
    server_side.join()


# Up: M1, M3, CONFIRM, records. Down: M2, CONFIRM, records. Cut twice, at different places.
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("first", range(11))
def test_after_a_cut_anywhere_frames_arrive_once_and_in_order(server, direction, first):
    change = cutting([first, (first + 4) % 11])
    with relaying(server, **{direction: change}) as relay:
        client, lane = server.pair(address=relay.address, patience=SOON)
        exchange(client, lane)
        client.close()
        assert lane.detach("the test counts what has arrived") == FRAMES


@pytest.mark.parametrize("instead_of", [0, 1])  # M2, the confirmation
def test_a_forged_refusal_costs_only_another_attempt(server, instead_of):
    forgeries = [ForgedError(Refusal.TICKET_USED)]

    def down(index, message):
        if index == instead_of and forgeries:
            raise forgeries.pop()
        return [message]

    with relaying(server, down=down) as relay:
        client, lane = server.pair(address=relay.address, patience=SOON)
        exchange(client, lane)
        client.close()
    assert not forgeries


def test_a_refusal_that_lasts_is_final(server):
    used = server.ticket()
    server.client(ticket=used).close()
    with pytest.raises(HandshakeError, match="has been used"):
        server.client(ticket=used, patience=1.5)


def test_a_stream_is_replaced_before_its_keys_are_exhausted(server):
    client, lane = server.pair(replace_after_bytes=2_000_000)
    exchange(client, lane)
    assert client.opened == lane.opened > 2
    client.close()


def sent_twice(server):
    """Return a hostile client after it has received two frames, its invitation, and its lane."""
    invitation = server.invitation()
    member = Member(invitation)
    lane = server.lanes.get(timeout=SOON)
    for _ in range(2):
        lane.send(Kind.STEP)
        assert member.wait_for(Kind.STEP) is Kind.STEP
    return member, invitation, lane


@pytest.mark.parametrize("counts", [[3], [2**32 - 1], [2, 1], [1, 0]], ids=str)
def test_impossible_acknowledgements_end_the_lane(server, counts):
    member, _, lane = sent_twice(server)
    with closing(member):
        for count in counts:
            member.send(end_of_step(member.sealer, acknowledged=count))
        ended(lane, FrameError, f"acknowledges {counts[-1]} frames")
        assert member.is_ended()


@pytest.mark.parametrize(("before", "count"), [(0, 3), (2, 1), (2, 2**32 - 1)])
def test_a_lie_in_the_confirmation_of_a_stream_ends_the_lane(server, before, count):
    member, invitation, lane = sent_twice(server)
    with closing(member):
        member.send(end_of_step(member.sealer, acknowledged=before))
        assert lane.receive(SOON).kind is Kind.STEP
        with closing(Member(invitation, member.resumption, acknowledged=count)) as again:
            ended(lane, FrameError, f"acknowledges {count} frames")
            assert again.is_ended()


def test_a_wait_during_a_cut_has_its_limit(server):
    proxy = Proxy(server.address)
    client, lane = server.pair(address=proxy.address)
    proxy.stop()
    with pytest.raises(LaneTimeoutError):
        client.receive(0.5)
    with pytest.raises(LaneTimeoutError):
        lane.receive(0.5)
    client.close()


def test_a_client_that_comes_back_too_late_hears_why():
    with serving(resume_timeout=0.5) as server:
        proxy = Proxy(server.address)
        client, lane = server.pair(address=proxy.address)
        proxy.stop()
        ended(lane, LaneCutError, r"split\.resume-timeout")
        proxy = Proxy(server.address, proxy.port)
        ended(client, PeerError, r"split\.resume-timeout")
        proxy.stop()


def test_the_streams_of_one_lane_take_the_room_of_one():
    with serving(max_lanes=1) as server:
        client, lane = server.pair()
        for number in range(5):
            cut(client)
            client.send(Kind.STEP, number)
            assert lane.receive(SOON).step == number
        client.close()


def test_a_ticket_that_is_left_over_opens_no_second_lane(server):
    client, lane = server.pair()
    client.send(Kind.END)
    lane.receive(SOON)
    resumption = client.stream.resumption
    client.close()
    stale = server.client(ticket=resumption)
    ended(stale, FrameError, "acknowledges 1 frames")  # of the lane that the ticket belongs to
    assert server.lanes.empty()
