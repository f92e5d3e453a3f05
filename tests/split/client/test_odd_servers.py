"""What a server may not answer, and what the client says of it."""

import threading
import time

import pytest
import torch

from finetuning.data.batching import collate
from split.client.split_model import SplitModel
from split.protocol.errors import LaneError
from split.protocol.frames import Kind, Limits
from split.protocol.training import RoundPlan
from tests.split.clients import Client, draw, split_settings
from tests.split.lanes import SOON, serving

LIMITS = Limits(32, "float32", 200)


@pytest.fixture(scope="module")
def ends(base):
    return Client("alpha", base, split_settings()).ends


def hidden(lane, frame, step=0, micro_batch=0, kind=Kind.HIDDEN, columns=0):
    states = frame.tensors["hidden"]
    states = torch.zeros(states.shape[0], states.shape[1] + columns, 32)
    name = "hidden" if kind is Kind.HIDDEN else "gradient"
    lane.send(kind, step, micro_batch, {name: states})


ODD = {
    "another micro-batch": (lambda *a: hidden(*a, micro_batch=5), "came for micro-batch 5"),
    "another step": (lambda *a: hidden(*a, step=3), "of step 3"),
    "a gradient first": (lambda *a: hidden(*a, kind=Kind.GRADIENT), "GRADIENT came"),
    "another shape": (lambda *a: hidden(*a, columns=1), "hidden states with"),
    "another kind": (lambda lane, _: lane.send(Kind.STEP), "STEP where HIDDEN is due"),
    "the same twice": (lambda *a: (hidden(*a), hidden(*a)), "came for micro-batch 0"),
}


def answering(server, answer, credits=4):
    """Serve one lane: welcome its client, and answer its first micro-batch."""

    def serve():
        lane = server.lanes.get(timeout=SOON)
        lane.receive(SOON)
        lane.send(Kind.WELCOME, fields={"credits": credits} if credits is not None else {})
        if answer is not None:
            answer(lane, lane.receive(SOON))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def join(model):
    deadline = time.monotonic() + SOON
    model.join(RoundPlan(1, 0, 1, 0), 200, deadline)


@pytest.mark.parametrize("what", ODD)
def test_an_answer_that_is_not_due_is_named(ends, what):
    answer, words = ODD[what]
    with serving(limits=LIMITS) as server:
        serving_thread = answering(server, answer)
        lane = server.client(limits=LIMITS)
        model = SplitModel(ends["head"], ends["tail"], lane, SOON)
        join(model)
        batches = [collate(draw(2, seed), 0) for seed in range(2)]
        with pytest.raises(LaneError, match=words):
            model.accumulate(batches, 0)
        lane.close()
        serving_thread.join()


@pytest.mark.parametrize("credits", [None, 0, -1, True, "many"])
def test_a_welcome_without_credits_is_named(ends, credits):
    with serving(limits=LIMITS) as server:
        serving_thread = answering(server, None, credits)
        lane = server.client(limits=LIMITS)
        with pytest.raises(LaneError, match="credits"):
            join(SplitModel(ends["head"], ends["tail"], lane, SOON))
        lane.close()
        serving_thread.join()
