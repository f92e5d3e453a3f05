"""The time for which clients wait for each other, and whose lane ends."""

import time
from types import SimpleNamespace

from split.server.schedules.wait_budget import WaitBudget
from split.server.session import Session
from tests.split.clients import split_settings


def test_each_second_is_divided_among_those_who_are_awaited(monkeypatch):
    """With 8 seconds for the round, 4 may be spent waiting, whoever is awaited."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    budget, sessions = WaitBudget(), {}
    for name in ("alpha", "beta", "gamma"):
        lane = SimpleNamespace(identity=SimpleNamespace(node=name), close=lambda _: None)
        sessions[name] = Session(lane, "train", None, split_settings(), lifetime=8.0)
        budget.add(sessions[name])
    for clock.now, awaited in ((0.0, ("alpha", "beta")), (3.0, ("beta",)), (3.9, ("beta",))):
        budget.note(awaited)
        assert not any(session.account.error for session in sessions.values())
    clock.now = 4.0
    budget.note(())
    assert [name for name, session in sessions.items() if session.account.error] == ["beta"]
    assert "waited 2 s for beta" in sessions["beta"].account.error  # 3 / 2 + 1
