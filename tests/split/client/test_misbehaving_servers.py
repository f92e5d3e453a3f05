"""Answers that a server may not send, and the client's errors."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from finetuning.data.batching import collate
from split.client.split_model import SplitModel
from split.protocol.errors import LaneError
from split.protocol.frames import Kind, Limits
from split.protocol.training import RoundPlan
from tests.split.clients import Client, draw, split_settings
from tests.split.lanes import SOON, serving

LIMITS = Limits(32, "float32", 200, average_bytes=2**16)


@pytest.fixture(scope="module")
def ends(base):
    return Client("alpha", base, split_settings()).ends


def hidden(lane, frame, step=0, micro_batch=0, kind=Kind.HIDDEN, columns=0):
    states = frame.tensors["hidden"]
    states = torch.zeros(states.shape[0], states.shape[1] + columns, 32)
    name = "hidden" if kind is Kind.HIDDEN else "gradient"
    lane.send(kind, step, micro_batch, {name: states})


ODD = {
    "another micro-batch": (lambda *a: hidden(*a, micro_batch=5), "of micro-batch 5"),
    "another step": (lambda *a: hidden(*a, step=3), "of step 3"),
    "a gradient first": (lambda *a: hidden(*a, kind=Kind.GRADIENT), "received GRADIENT"),
    "another shape": (lambda *a: hidden(*a, columns=1), "a tensor of shape"),
    "another kind": (lambda lane, _: lane.send(Kind.STEP), "STEP; expected HIDDEN"),
    "the same twice": (lambda *a: (hidden(*a), hidden(*a)), "of micro-batch 0"),
}


def answering(server, *answers, credits=4):
    """Serve one lane: welcome its client, and answer its first frames."""

    def serve():
        lane = server.lanes.get(timeout=SOON)
        lane.receive(SOON)
        lane.send(Kind.WELCOME, fields={"credits": credits} if credits is not None else {})
        for answer in answers:
            answer(lane, lane.receive(SOON))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def join(model):
    deadline = time.monotonic() + SOON
    model.join(RoundPlan(2, 0, 2, 0), 200, deadline, average_every=1)


@contextmanager
def answered(ends, *answers, credits=4, limits=LIMITS):
    """Yield a model whose server sends ``answers``."""
    with serving(limits=LIMITS) as server:
        serving_thread = answering(server, *answers, credits=credits)
        lane = server.client(limits=limits)
        try:
            yield SplitModel(ends["head"], ends["tail"], lane, SOON)
        finally:
            lane.close()
            serving_thread.join()


@pytest.mark.parametrize("what", ODD)
def test_an_answer_that_is_not_due_is_named(ends, what):
    answer, words = ODD[what]
    batches = [collate(draw(2, seed), 0) for seed in range(2)]
    with answered(ends, answer) as model:
        join(model)
        with pytest.raises(LaneError, match=words):
            model.accumulate(batches, 0)


def test_an_answer_to_what_was_not_sent_is_named(ends):
    def both(lane, frame):
        hidden(lane, frame)
        hidden(lane, frame, micro_batch=1)

    batches = [collate(draw(2, seed), 0) for seed in range(2)]
    with answered(ends, both, credits=1) as model:
        join(model)
        with pytest.raises(LaneError, match=r"of micro-batch 1; .* of the 1 that were sent"):
            model.accumulate(batches, 0)


def end_of_step(lane, _, step=0, **fields):
    lane.send(Kind.STEP, step, fields={"factor": 1.0, "norm": 1.0} | fields)


ODD_ENDS = {
    "a factor above 1": ({"factor": 1.5}, "factor = 1.5"),
    "a factor below 0": ({"factor": -0.5}, "factor = -0.5"),
    "a norm below 0": ({"norm": -1.0}, "norm = -1.0"),
    "a norm in words": ({"norm": "1.0"}, "norm = '1.0'"),
    "a truth value": ({"factor": True}, "factor = True"),
    "another step": ({"step": 1}, "STEP of step 1"),
}


@pytest.mark.parametrize("what", ODD_ENDS)
def test_an_invalid_end_of_a_step_changes_no_gradient(ends, what):
    changes, words = ODD_ENDS[what]
    with answered(ends, lambda *a: end_of_step(*a, **changes)) as model:
        join(model)
        gradients = {name: torch.ones_like(p) for name, p in model.parameters.items()}
        for name, parameter in model.parameters.items():
            parameter.grad = gradients[name].clone()
        with pytest.raises(LaneError, match=words):
            model.clip(0.5)
        assert all(torch.equal(p.grad, gradients[n]) for n, p in model.parameters.items())


def test_an_end_of_a_step_needs_its_fields(ends):
    with answered(ends, lambda lane, _: lane.send(Kind.STEP)) as model:
        join(model)
        with pytest.raises(LaneError, match="factor = None"):
            model.clip(0.5)


def average(lane, frame, step=None, change=lambda tensors: tensors):
    """Answer with the client's own adapters, modified by ``change``."""
    lane.send(Kind.AVERAGE, frame.step if step is None else step, tensors=change(frame.tensors))


def without_one(tensors):
    return dict(list(tensors.items())[1:])


ODD_AVERAGES = {
    "another step": ({"step": 2}, "AVERAGE of step 2"),
    "nothing": ({"change": lambda tensors: {}}, "average has no"),
    "all but one": ({"change": without_one}, "average has no"),
    "float64": ({"change": lambda t: {n: v.double() for n, v in t.items()}}, "average has no"),
    "other shapes": ({"change": lambda t: {n: v.T for n, v in t.items()}}, "average has no"),
}


@pytest.mark.parametrize("what", ODD_AVERAGES)
def test_an_invalid_average_changes_no_weight(ends, what):
    changes, words = ODD_AVERAGES[what]
    with answered(ends, end_of_step, lambda *a: average(*a, **changes)) as model:
        before = {name: p.detach().clone() for name, p in model.parameters.items()}
        join(model)
        model.clip(0.5)
        with pytest.raises(LaneError, match=words):
            model.accumulate([collate(draw(2, 0), 0)], 0)
        assert all(torch.equal(p, before[name]) for name, p in model.parameters.items())


def test_an_average_that_was_not_agreed_on_is_refused(ends):
    sent = {"a": torch.zeros(1)}
    with answered(
        ends,
        lambda lane, _: lane.send(Kind.AVERAGE, 1, tensors=sent),
        limits=Limits(32, "float32", 200),
    ) as model:
        join(model)
        with pytest.raises(LaneError, match="AVERAGE, but adapters are not averaged"):
            model.clip(0.5)


ODD_TOKENS = {
    "another number": (lambda *a: hidden(*a, micro_batch=1), "micro-batch 1"),
    "another step": (lambda *a: hidden(*a, step=1), "of step 1"),
    "another shape": (lambda *a: hidden(*a, columns=1), "a tensor of shape"),
    "another kind": (lambda *a: hidden(*a, kind=Kind.GRADIENT), "GRADIENT; expected HIDDEN"),
}


@pytest.mark.parametrize("what", ODD_TOKENS)
def test_an_invalid_answer_ends_a_generation(ends, what):
    answer, words = ODD_TOKENS[what]
    prompts = torch.tensor([[5, 6, 7]])
    with answered(ends, answer) as model:
        model.choose("base", None)
        with pytest.raises(LaneError, match=words):
            model.generate(prompts, torch.ones_like(prompts), 4, do_sample=False)


@pytest.mark.parametrize("credits", [None, 0, -1, True, "many"])
def test_a_welcome_without_credits_is_named(ends, credits):
    with answered(ends, credits=credits) as model, pytest.raises(LaneError, match="credits"):
        join(model)
