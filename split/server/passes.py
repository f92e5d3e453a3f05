"""The passes through the body that jobs have begun, and the activation budget that they take."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from split.server.compute import ComputeThread, Result


class Passes:
    """The passes of one owner of jobs, in whose jobs the methods are called.

    ``put`` queues a function as a job of the owner.
    """

    def __init__(self, compute: ComputeThread, put: Callable[[Callable[[], None]], object]) -> None:
        self.pending = 0  # number of passes whose results will be worked on in jobs
        self.held = 0  # padded tokens taken from the budget, including those of a failed job
        self._compute = compute
        self._put = put

    def when_complete(self, begun: Future[Result], work: Callable[[Result], None]) -> None:
        """Call ``work`` with the result of a pass: now, or in a job when the pass is complete.

        Results are worked on in the order of the passes.
        """
        if begun.done() and not self.pending:
            work(begun.result())
            return
        self.pending += 1
        begun.add_done_callback(lambda done: self._put(partial(self._complete, done, work)))

    def _complete(self, done: Future[Result], work: Callable[[Result], None]) -> None:
        self.pending -= 1
        work(done.result())

    def release(self, tokens: int) -> None:
        """Return tokens to the activation budget, unless all have been returned before."""
        tokens = min(tokens, self.held)
        self.held -= tokens
        self._compute.release(tokens)
