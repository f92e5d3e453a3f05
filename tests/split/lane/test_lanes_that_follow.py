"""What becomes of lanes that a client opens one after another, as odd clients may, too."""

import gc
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from split.client.client_lane import ClientLane
from split.lane.dialling import connect
from split.lane.lasting import LastingLane
from split.protocol.errors import LaneBusyError, LaneCutError, LaneTimeoutError, PeerError
from split.protocol.frames import Frame, Kind, Limits
from split.server import block_server
from tests.split.clients import LONGEST, Client, serving, split_settings
from tests.split.lanes import SOON, ended

PLACE = {"steps": 3, "first_step": 0, "total_steps": 3, "longest": 16, "wants_gradient": True}


def dial(invitation, before=None):
    """Open a client's first lane, or one with the ticket of one before."""
    return connect(
        invitation.address,
        before.resumption if before else invitation.ticket,
        invitation.identity,
        invitation.server_key,
        invitation.suite,
        Limits(32, "float32", LONGEST),
        time.monotonic() + 60,
    )


def follow(invitation, before, has):
    """Open another lane, and say how many frames of the round have come."""
    lane = dial(invitation, before)
    lane.send(Kind.JOIN, fields={"resume": has})
    return lane


def cut(lane):
    lane._release()
    ended(lane, LaneCutError)


def send_hidden(lane, index=0):
    tensors = {"hidden": torch.zeros(2, 8, 32), "lengths": torch.tensor([8, 8])}
    counts = {"targets": 1, "step_targets": 99, "micro_batches": 99}
    lane.send(Kind.HIDDEN, 0, index, tensors, counts | {"side": "right"})


def until(condition):
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def let_beta_join(server):
    """Let the other client come, and go."""
    lane = dial(server.invite_to_train("beta", 1, 0, 60.0))
    lane.send(Kind.JOIN, fields=PLACE)
    assert lane.receive(SOON).kind is Kind.WELCOME
    lane.close()


@pytest.fixture
def alone(base, beginning):
    """Give what serves alpha with some settings; its first lane, after ``JOIN``."""
    opened = []

    def begin(wait=True, **settings):
        context = serving(base, beginning, split_settings(**settings))
        server = context.__enter__()
        opened.append(context)
        server.begin_round({"alpha": 1.0} if wait else {"alpha": 1.0, "beta": 1.0}, 0)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        lane = dial(invitation)
        lane.send(Kind.JOIN, fields=PLACE)
        if wait:
            assert lane.receive(SOON).kind is Kind.WELCOME
        return server, invitation, lane

    yield begin
    for context in opened:
        context.__exit__(None, None, None)


def test_lanes_that_were_cut_leave_no_frames(alone):
    """While the round waits for others to join, nobody takes them."""
    server, invitation, first = alone(wait=False, schedule="client-batch", join_timeout=60.0)
    lane = first
    for _ in range(12):
        for index in range(10):
            send_hidden(lane, index)
        time.sleep(0.1)
        cut(lane)
        lane = follow(invitation, first, 0)
    until(lambda: len(server._server._threads) <= 2)
    gc.collect()
    frames = [o for o in gc.get_objects() if type(o) is Frame and o.kind is Kind.HIDDEN]
    assert len(frames) <= 2 * 10
    let_beta_join(server)
    assert [lane.receive(SOON).fields.get("resume") for _ in range(2)] == [1, None]
    lane.close()


def test_a_lane_that_is_followed_is_empty(server):
    client, lane = server.pair()
    lasting = LastingLane(lane)
    client.send(Kind.STEP)
    client.send(Kind.AVERAGE, tensors={"a": torch.zeros(500_000)})
    until(lambda: len(lane._incoming) == 2)
    sending = client._sealer.seal

    def only_the_first_record(*frame):
        yield next(sending(*frame))
        time.sleep(SOON)

    client._sealer.seal = only_the_first_record
    client.send(Kind.AVERAGE, tensors={"a": torch.zeros(500_000)})
    until(lambda: lane._opener.mid_frame)
    server.book.register(lane.resumption, lane.identity, SOON)
    again, lane_again = server.pair(ticket=client.resumption)
    again.send(Kind.JOIN, fields={"resume": 0})
    bytes_up = lane.traffic.bytes_up
    lasting.offer(lane_again)
    lasting.accept(SOON)
    assert again.receive(SOON).fields == {"resume": 0}
    assert lasting.present is lane_again and not lane._incoming
    until(lambda: not lane._opener.mid_frame)
    assert lasting.traffic.bytes_up >= bytes_up + lane_again.traffic.bytes_up
    client._release()
    again.close()


def test_the_newest_lane_counts_while_another_one_is_silent(alone):
    server, invitation, first = alone(resume_timeout=SOON * 10)
    cut(first)
    silent = dial(invitation, first)
    time.sleep(0.5)  # until the server waits for its JOIN
    started = time.monotonic()
    lane = follow(invitation, first, 1)
    assert lane.receive(SOON).kind is Kind.WELCOME
    assert time.monotonic() - started < SOON
    ended(silent, LaneCutError)
    send_hidden(lane)
    assert lane.receive(SOON).kind is Kind.HIDDEN
    lane.close()
    silent.close()
    (account,) = server.finish_lanes()
    assert account.resumed == 1


def test_a_lane_that_follows_and_is_silent_names_the_setting(alone):
    server, invitation, first = alone(resume_timeout=1.0)
    cut(first)
    silent = dial(invitation, first)
    ended(silent, match=r"split\.resume-timeout|was cut")
    until(lambda: server._accounts)
    silent.close()
    assert "split.resume-timeout" in server.finish_lanes()[0].error


def test_one_client_can_t_take_all_places(alone, monkeypatch):
    monkeypatch.setattr(block_server, "_MOST_LANES", 4)
    server, invitation, first = alone(wait=False, schedule="client-batch", join_timeout=60.0)
    lanes, end = [first], time.monotonic() + SOON
    while len(lanes) < 9:
        with suppress(LaneBusyError):  # those that were superseded go within a second
            lanes.append(follow(invitation, first, 0))
        assert time.monotonic() < end
        time.sleep(0.2)
    for lane in lanes[:-1]:
        ended(lane, LaneCutError)
    until(lambda: len(server._server._threads) == 2)  # that of the session, and of the newest
    let_beta_join(server)
    assert [lanes[-1].receive(SOON).fields.get("resume") for _ in range(2)] == [1, None]
    lanes[-1].close()


def test_cutting_is_no_excuse_for_silence(alone):
    server, invitation, lane = alone(frame_timeout=2.0)
    started = time.monotonic()
    with suppress(PeerError):
        while time.monotonic() - started < SOON:
            cut(lane)
            lane = follow(invitation, lane, 1)
            assert lane.receive(SOON).kind is Kind.WELCOME
            time.sleep(0.3)
    assert time.monotonic() - started < SOON
    (account,) = server.finish_lanes()
    assert "split.frame-timeout" in account.error and account.resumed > 1


def test_a_client_that_comes_back_too_late_hears_why(alone):
    server, invitation, first = alone(resume_timeout=0.5)
    cut(first)
    until(lambda: server._accounts)
    ended(follow(invitation, first, 1), PeerError, r"split\.resume-timeout")


@pytest.mark.parametrize(
    ("kind", "fields"), [(Kind.STEP, {"resume": 1}), (Kind.JOIN, {"resume": True}), (Kind.JOIN, {})]
)
def test_a_lane_that_follows_begins_with_what_the_client_has(alone, kind, fields):
    server, invitation, first = alone()
    cut(first)
    lane = dial(invitation, first)
    lane.send(kind, fields=fields)
    ended(lane, PeerError, "was to resume")
    assert "was to resume" in server.finish_lanes()[0].error


def test_a_ticket_that_is_left_over_opens_no_second_session(base, beginning):
    with serving(base, beginning, split_settings()) as server:
        server.begin_round({"alpha": 9}, 0)
        client, lanes = Client("alpha", base, split_settings()), []
        client.train(server, beginning, 2, disturb=lambda m: lanes.append(m.lane.present))
        until(lambda: server._accounts)
        other = server.invite_to_evaluate("beta", 1, {}, 60.0)
        lane = dial(replace(other, identity=lanes[0].identity), lanes[0])
        ended(lane, PeerError, "this phase of the round is over")
        (account,) = server.finish_lanes()
    assert (account.steps, account.error) == (2, "")


def test_a_server_that_does_not_go_on_is_named_by_the_setting(server):
    client, lane = server.pair()
    lanes = []

    def reconnect(before):
        server.book.register(lane.resumption, lane.identity, SOON)
        lanes.append(server.client(ticket=before.resumption))
        return lanes[-1]

    client_lane = ClientLane(client, 0.5, reconnect)
    client_lane.outlast_cuts()
    client._release()
    with pytest.raises(LaneTimeoutError, match=r"split\.frame-timeout"):
        client_lane.receive(Kind.WELCOME)
    assert client_lane.opened == 2
    client_lane.close()
    assert lanes[0].ended
