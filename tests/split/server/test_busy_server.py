"""A served model answers one more client even if others keep the server busy without a pause."""

import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import pytest
import torch

from split.client.split_model import SplitModel
from split.protocol.frames import Kind
from tests.split.model.test_generation import prompts
from tests.split.server.test_model_server import Served
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
FEW, ENDLESS = 4, 10_000  # new tokens
GENERATORS = 5
# Full except for the few tokens.
ROOM = GENERATORS * (1 + ENDLESS) + 3 * (11 + FEW)
SECONDS = 300.0  # no lane of the tests lives longer

# What keeps the server busy through a lane: calls the function after each answer, and ends when
# that returns True.
Work = Callable[[SplitModel, Callable[[], bool]], None]


class Busy(threading.Thread):
    """A client that keeps the server busy until it is told to stop."""

    def __init__(self, model: SplitModel, work: Work) -> None:
        super().__init__()
        self._model, self._work = model, work
        self.stopping = threading.Event()
        self.answers = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work(self._model, self._answered)
        except BaseException as error:
            self.error = error

    def _answered(self) -> bool:
        self.answers += 1
        return self.stopping.is_set()


def generate(model: SplitModel, answered: Callable[[], bool]) -> None:
    """Generate a text of 10,000 tokens."""

    def stops(tokens, scores):
        return torch.full((len(tokens),), answered())

    model.generate(
        torch.tensor([[5]]),
        torch.tensor([[1]]),
        ENDLESS,
        pad_token_id=0,
        do_sample=False,
        min_new_tokens=ENDLESS,
        stopping_criteria=[stops],
    )


def choosing(*names: str, ahead: int) -> Work:
    """Return work that consists of choosing models in turn without using them.

    Args:
        names: The models.
        ahead: How many choices to send before the answer to the first.

    """

    def choose(model: SplitModel, answered: Callable[[], bool]) -> None:
        for sent, name in enumerate(itertools.cycle(names)):
            if sent >= ahead:
                assert model.lane.receive(SECONDS).kind is Kind.WELCOME
                if answered():
                    return
            model.lane.send(Kind.JOIN, fields={"model": name})

    return choose


def wait_for_answers(clients: list[Busy]) -> None:
    """Wait until each client has received another answer; fail if a client has ended."""
    before = [client.answers for client in clients]

    def told():
        return [(client.answers, client.error) for client in clients]

    def answered() -> bool:
        assert all(client.is_alive() for client in clients), told()
        return all(client.answers > n for client, n in zip(clients, before, strict=True))

    wait_until(answered, SECONDS, seen=told)


@contextmanager
def busy(clients: list[Busy]):
    """Keep the server busy with clients, each of which must be answered before and in the block."""
    for client in clients:
        client.start()
    try:
        wait_for_answers(clients)
        yield
        wait_for_answers(clients)
    finally:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(SECONDS)
    assert not [client.error for client in clients if client.error]


@pytest.fixture
def scene(random_checkpoint) -> Served:
    # So many blocks that the server needs longer for a token than all clients together.
    return Served(random_checkpoint("Llama", num_hidden_layers=12), activation_budget=ROOM)


@pytest.mark.parametrize(
    "works",
    [
        [generate] * GENERATORS,
        pytest.param([choosing("personalised", "global", ahead=1)] * 2, marks=pytest.mark.nightly),
        pytest.param([choosing("global", ahead=8)] * 2, marks=pytest.mark.nightly),
    ],
    ids=["generations", "choices of another model", "choices of the same model"],
)
def test_one_more_client_is_answered(scene, works):
    def text(model):
        return model.generate(*prompts(), FEW, pad_token_id=0, do_sample=False)

    expected, late = text(scene.whole()), scene.client("late")
    others = [scene.client(f"busy {number}") for number in range(len(works))]
    with scene.model_server() as server, ExitStack() as lanes:
        names = dict.fromkeys(("global", "personalised"), scene.parts["body"])
        invitations = [server.invite(client.name, names, SECONDS) for client in others]
        models = [lanes.enter_context(c.lane(i)) for c, i in zip(others, invitations, strict=True)]
        for model in models:
            scene.choose(model)
        with (
            busy([Busy(*each) for each in zip(models, works, strict=True)]),
            late.lane(scene.invite(server, late, SECONDS)) as model,
        ):
            scene.choose(model)
            assert torch.equal(text(model), expected)
