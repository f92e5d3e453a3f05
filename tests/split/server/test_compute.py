"""The order in which clients' jobs are computed."""

import pytest

from split.server.compute import ComputeThread, Job, Priority
from tests.waiting import wait_until


class Owner:
    """The owner of a job."""

    def failed(self, error: BaseException) -> None:
        raise error


class Thread:
    """A compute thread whose clock is set by the test, and the names of its jobs in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []
        self.compute = ComputeThread(activation_budget=10, clock=lambda: self.now)

    def put(self, name, priority, tokens=0, then=lambda: None, owner=None, detail=None) -> None:
        def run() -> None:
            self.order.append(name)
            then()

        self.compute.put(Job(owner or Owner(), priority, run, tokens, detail=detail))


@pytest.fixture
def thread():
    made = Thread()
    yield made
    made.compute.stop()


def test_evaluating_losses_does_not_keep_generations_waiting(thread):
    """One client always has another micro-batch; a generation begins all the same, in its turn."""
    put, order = thread.put, thread.order

    def queue():  # while nothing is computed
        put("generation", Priority.FORWARD, 10)
        put("loss 1", Priority.FORWARD)
        put("generation without room", Priority.FORWARD, 10)
        put("loss 2", Priority.FORWARD)
        put("gradient", Priority.BACKWARD)

    put("queue", Priority.CLEANUP, then=queue)
    wait_until(lambda: len(order) >= 5)
    assert order == ["queue", "gradient", "generation", "loss 1", "loss 2"]
    thread.compute.release(10)
    wait_until(lambda: len(order) >= 6)
    assert order[-1] == "generation without room"


def test_no_number_of_generations_keeps_another_waiting(thread):
    """Three clients always have another token, which takes half a second; a fourth has a prompt."""

    def put_token(name):
        def then():
            thread.now += 0.5
            if len(thread.order) < 12:
                put_token(name)

        thread.put(name, Priority.BACKWARD, then=then)

    def queue():  # while nothing is computed
        for name in ("a", "b", "c"):
            put_token(name)
        thread.put("prompt", Priority.FORWARD, 10)

    thread.put("queue", Priority.CLEANUP, then=queue)
    wait_until(lambda: len(thread.order) >= 12)
    assert thread.order[:8] == ["queue", "a", "b", "c", "a", "prompt", "b", "c"]


def test_a_small_generation_does_not_overtake_a_large_one(thread):
    def queue():
        thread.put("large", Priority.FORWARD, 10)
        thread.put("small", Priority.FORWARD, 4)
        thread.put("loss", Priority.FORWARD)
        thread.now += 60.0

    thread.put("holds room", Priority.FORWARD, 4, then=queue)
    for number, freed in (2, 4), (3, 10), (4, 4):
        wait_until(lambda number=number: len(thread.order) >= number)
        thread.compute.release(freed)
    assert thread.order == ["holds room", "loss", "large", "small"]


OWN, OTHER = Owner(), Owner()


@pytest.mark.parametrize(
    ("waiting", "seconds"),
    [
        ([(OTHER, 10)], 0.0),  # waits for the compute thread
        ([(OTHER, 11)], 1.0),
        ([(OWN, 11)], 0.0),
        ([(OWN, 11), (OTHER, 0)], 0.0),  # needs no budget
        ([(OWN, 11), (OTHER, 1)], 1.0),  # may not overtake
    ],
)
def test_only_budget_for_which_other_owners_wait_is_wanted(thread, waiting, seconds):
    """The budget is 10; nothing else is computed meanwhile."""
    found = []

    def queue():
        for owner, tokens in waiting:
            thread.put("waiting", Priority.FORWARD, tokens, owner=owner)
        thread.now += 1.0
        found.append(thread.compute.seconds_wanted(OWN))
        thread.compute.release(2)  # enough for all

    thread.put("queue", Priority.CLEANUP, then=queue)
    wait_until(lambda: len(thread.order) == 1 + len(waiting))
    assert found == [seconds]


def test_a_job_takes_those_of_others_that_wait_for_nothing_else(thread):
    taken, busy = [], Owner()

    def take():
        jobs = thread.compute.take_with(lambda job: job.detail != "other", 0, 0.0)
        taken.extend(job.detail for job in jobs)
        for job in jobs:
            thread.compute.run(job)

    def queue():
        thread.put("leader", Priority.BACKWARD, then=take, detail="leader")
        thread.put("a", Priority.BACKWARD, detail="a")
        thread.put("prompt", Priority.FORWARD, owner=busy)
        thread.put("after the prompt", Priority.BACKWARD, owner=busy, detail="busy")
        thread.put("other", Priority.BACKWARD, detail="other")
        thread.put("b", Priority.BACKWARD, detail="b")

    thread.put("queue", Priority.CLEANUP, then=queue)
    wait_until(lambda: len(thread.order) == 7)
    assert sorted(taken) == ["a", "b"]
    assert thread.order.index("leader") < thread.order.index("a") < thread.order.index("other")


@pytest.mark.parametrize("another", [False, True])
def test_a_job_waits_for_others_only_while_nothing_else_waits(thread, another):
    found = []

    def take():
        found.append(thread.compute.take_with(lambda job: True, 1, 30.0))

    thread.put("leader", Priority.BACKWARD, then=take)
    if another:
        thread.put("another", Priority.BACKWARD)
        wait_until(lambda: "another" in thread.order)
        assert found == [[]]
    else:
        thread.put("late", Priority.BACKWARD, detail="late")
        wait_until(lambda: found)
        assert [job.detail for job in found[0]] == ["late"]
