"""Clients that wait for each other at the beginning of a round, and the server's stop."""

import threading

import pytest

from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from tests.marks import nightly
from tests.split.clients import SIZES, Client, assert_nothing_is_left, serving, split_settings
from tests.waiting import wait_until


@pytest.mark.parametrize("schedule", ["client-batch", nightly("hierarchical")])
def test_who_has_gone_before_the_round_begins_has_not_joined(base, beginning, schedule):
    """Alpha goes, and gamma never comes; beta alone is fewer than the minimum."""
    split = split_settings(schedule=schedule, average_every=2, join_timeout=5.0)
    alpha, beta = (Client(name, base, split) for name in ("alpha", "beta"))
    plan = {"steps": 3, "first_step": 0, "total_steps": 3, "longest": 16}
    with serving(base, beginning, split, minimum=2) as server:
        server.begin_round(SIZES, 0)
        with alpha.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            model.lane.send(Kind.JOIN, fields=plan)
            wait_until(lambda: server.schedule.barrier.joined)
        with pytest.raises(LaneError, match="1 of 3 clients joined"):
            beta.train(server, beginning, 3)


@pytest.mark.parametrize(("schedule", "period"), [("client-batch", 0), ("hierarchical", 2)])
def test_nobody_waits_for_a_client_that_is_excused(base, beginning, schedule, period):
    """Alpha and gamma don't come; beta trains long before the join-timeout."""
    split = split_settings(schedule=schedule, average_every=period, join_timeout=600.0)
    beta = Client("beta", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        server.mark_absent("alpha")
        threading.Timer(1.0, server.mark_absent, ["gamma"]).start()
        beta.train(server, beginning, 3)
    assert len(beta.losses) == 3


def test_too_few_are_left_when_others_are_excused(base, beginning):
    beta = Client("beta", base, split_settings(schedule="client-batch", join_timeout=600.0))
    with serving(base, beginning, beta.split, minimum=2) as server:
        server.begin_round(SIZES, 0)
        for other in ("alpha", "gamma"):
            server.mark_absent(other)
        with pytest.raises(LaneError, match="1 of 3 clients joined and the others answered"):
            beta.train(server, beginning, 3)


def test_lanes_that_wait_for_others_to_join_can_be_ended(base, beginning):
    """Where the join-timeout is longer than the time that lanes have to end."""
    split = split_settings(schedule="client-batch", join_timeout=30.0)
    client = Client("alpha", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        with client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            plan = {"steps": 3, "first_step": 0, "total_steps": 3, "longest": 16}
            model.lane.send(Kind.JOIN, fields=plan)
            wait_until(lambda: server.schedule.barrier.joined)
            (account,) = server.finish_lanes(timeout_seconds=10.0)
        assert "this phase of the round is over" in account.error


def test_a_server_stops_even_if_a_lane_does_not_end(base, beginning):
    client = Client("alpha", base, split_settings())
    with serving(base, beginning, split_settings()) as server:
        invitation = server.invite_to_evaluate("alpha", 0, {"base": None}, 60.0)
        with client.lane(invitation) as model:
            model.choose("base", None)
            with pytest.raises(RuntimeError, match="did not end within 0 s"):
                server.stop(timeout_seconds=0.0)
        assert_nothing_is_left()
