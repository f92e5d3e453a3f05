"""How often the host waits for a GPU, which PyTorch reports only with CUDA."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.model.base_model import load_base_model
from finetuning.model.whole_model import WholeModel
from finetuning.settings import ModelSettings
from finetuning.training.continual import ContinualPenalty
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import Noise, PrivateGradients
from finetuning.training.proximal import ProximalPenalty
from tests.split.clients import ADAPTER, MODEL, SIZES, TRAIN, Client, draw, serving, split_settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

STEPS = 4


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list, to which a message is added each time the host waits."""
    found: list[str] = []

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if "synchroniz" in str(message):
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def more_of(run: Callable[[int], object], first: int, second: int) -> float:
    """Return the number of waits per additional step or token."""
    run(first)  # what is done once has been done
    counts = []
    for count in (first, second):
        with waits() as found:
            run(count)
        counts.append(len(found))
    return (counts[1] - counts[0]) / (second - first)


@pytest.fixture
def model(base) -> WholeModel:
    loaded = load_base_model(ModelSettings(name=str(base))).model
    assert loaded.dtype is torch.bfloat16
    return WholeModel(attach_adapter(loaded, ADAPTER, "base"))


@pytest.mark.parametrize("kind", ["none", "continual", "share", "proximal", "private"])
def test_a_step_of_three_micro_batches(model, kind):
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

    assert more_of(run, STEPS, 3 * STEPS) <= 4


def test_a_generated_token(model):
    tokens = torch.randint(2, 64, (2, 8))
    mask = torch.ones_like(tokens)

    def run(count: int) -> None:
        model.generate(tokens, mask, count, min_new_tokens=count, do_sample=False, pad_token_id=0)

    assert more_of(run, 8, 40) <= 1.25  # now and then, the end is looked for twice


@pytest.mark.parametrize("schedule", ["serial", "client-batch", "hierarchical"])
def test_a_split_step_of_client_and_server(base, beginning, schedule):
    """The client reads losses and norm, and the server its norm; copies of frames don't wait."""
    dtype = MODEL.model_copy(update={"dtype": "bfloat16"})
    split = split_settings(schedule=schedule, wire_dtype="bfloat16")

    def run(steps: int) -> None:
        with serving(base, beginning, split, model=dtype) as server:
            server.begin_round({"alpha": SIZES["alpha"]}, 0)
            Client("alpha", base, split, model=dtype).train(server, beginning, steps=steps)

    assert more_of(run, 6, 18) <= 6
