"""How often the host waits for an accelerator: the fake one, or a GPU if there is one."""

import time

import pytest
import torch

from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.model.base_model import load_base_model
from finetuning.settings import ModelSettings
from finetuning.training.continual import ContinualPenalty
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import Noise, PrivateGradients
from finetuning.training.proximal import ProximalPenalty
from finetuning.whole_model import WholeModel
from tests.split.clients import ADAPTER, MODEL, SIZES, TRAIN, Client, draw, serving, split_settings
from tests.split.clients import STEPS as STEPS_OF_A_ROUND

pytestmark = pytest.mark.accelerator

STEPS = 2


@pytest.fixture
def model(assert_waits, base) -> WholeModel:
    loaded = load_base_model(ModelSettings(name=str(base))).model
    assert loaded.dtype is torch.bfloat16
    return WholeModel(attach_adapter(loaded, ADAPTER, "base"))


@pytest.mark.parametrize("kind", ["none", "continual", "share", "proximal", "private"])
def test_a_step_of_three_micro_batches(assert_waits, model, kind):
    parameters = trainable_parameters(model.peft_model)
    anchor = {name: p.detach() + 0.1 for name, p in parameters.items()}
    penalty = {
        "none": lambda: None,
        "private": lambda: None,
        "proximal": lambda: ProximalPenalty(parameters, anchor, 0.1),
        "continual": lambda: ContinualPenalty(parameters, anchor, anchor, 0.1),
        "share": lambda: ContinualPenalty(parameters, anchor, anchor, 0.1, share=0.1),
    }[kind]()
    stages = model
    if kind == "private":
        stages = PrivateGradients(model, parameters, Noise(1.0, 1.0, 6.0))
    examples = draw(6 * 3 * STEPS, 0)

    def run(steps: int) -> None:
        batches = [list(range(6 * n, 6 * n + 6)) for n in range(steps)]
        train_round(
            stages,
            parameters,
            examples,
            0,
            LocalRound(batches, 0, steps, 0, time.monotonic() + 600),
            TRAIN,
            penalty,
        )

    assert_waits(run, STEPS, 3 * STEPS, most=4)


def test_a_generated_token(assert_waits, model):
    tokens = torch.randint(2, 64, (2, 8))
    mask = torch.ones_like(tokens)

    def run(count: int) -> None:
        model.generate(tokens, mask, count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    assert_waits(run, 8, 40, most=1)


@pytest.mark.parametrize("schedule", ["serial", "client-batch", "hierarchical"])
def test_a_split_step_of_client_and_server(assert_waits, base, beginning, schedule):
    """The client waits for losses and the norm; the server waits for the norm on each device."""
    dtype = MODEL.model_copy(update={"dtype": "bfloat16"})
    split = split_settings(schedule=schedule, wire_dtype="bfloat16")

    def run(steps: int) -> None:
        with serving(base, beginning, split, model=dtype) as server:
            server.begin_round({"alpha": SIZES["alpha"]}, 0)
            Client("alpha", base, split, model=dtype).train(server, beginning, steps=steps)

    assert_waits(run, STEPS, STEPS_OF_A_ROUND, most=4)
