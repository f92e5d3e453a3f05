"""The order in which clients' jobs are computed."""

from split.server.compute import ComputeThread, Job, Priority
from tests.waiting import wait_until


class Owner:
    """The owner of a job."""

    def failed(self, error: BaseException) -> None:
        raise error


def test_evaluating_losses_does_not_keep_generations_waiting():
    """One client always has another micro-batch; a generation begins all the same, in its turn."""
    compute, order = ComputeThread(activation_budget=10), []

    def put(name, priority, tokens=0, then=lambda: None):
        def run():
            order.append(name)
            then()

        compute.put(Job(Owner(), priority, run, tokens))

    def queue():  # while nothing is computed
        put("generation", Priority.GENERATION, 10)
        put("loss 1", Priority.FORWARD)
        put("generation without room", Priority.GENERATION, 10)
        put("loss 2", Priority.FORWARD)
        put("gradient", Priority.BACKWARD)

    put("queue", Priority.CLEANUP, then=queue)
    wait_until(lambda: len(order) >= 5)
    assert order == ["queue", "gradient", "generation", "loss 1", "loss 2"]
    compute.release(10)
    wait_until(lambda: len(order) >= 6)
    assert order[-1] == "generation without room"
    compute.stop()
