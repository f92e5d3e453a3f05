"""Private gradients: equality with a loop over rows, clipping, noise, sampling, and secrets."""

import math
import time
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from finetuning.adapters.adapter import attach_adapter, export_adapter, trainable_parameters
from finetuning.data.batching import collate
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model
from finetuning.randomness import normal, secret_stream, uniform
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import (
    Noise,
    PrivateGradients,
    clipped_sums,
    poisson_steps,
)
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import HYBRIDS, INPUTS, draw_weights

Gradients = dict[str, torch.Tensor]
PREFIX = AdapterSettings(kind="prefix", prefix_length=5)
LORA = AdapterSettings(rank=2, alpha=4, dropout=0.5, targets="q_proj,v_proj,down_proj")


def with_effect(model: Any, settings: AdapterSettings) -> Any:
    """Attach an adapter whose every weight has a gradient."""
    return draw_weights(attach_adapter(model, settings, "base"), 0.3)


def row_by_row(model: Any, examples: Any, reference_loss: Any) -> list[Gradients]:
    """Compute each row's gradient separately, with the library's own forward."""
    rows = []
    for example in examples:
        model.zero_grad()
        reference_loss(model.eval(), [example]).backward()
        rows.append({n: p.grad.clone() for n, p in trainable_parameters(model).items()})
    model.zero_grad()
    return rows


def assert_equal_rows(found: Gradients, rows: list[Gradients]) -> None:
    for name, gradients in found.items():
        expected = torch.stack([row[name] for row in rows])
        assert expected.flatten(1).abs().amax(1).min() > 1e-5, "a row without a gradient"
        assert (gradients - expected).abs().max() <= 1e-6 * max(1, expected.abs().max())


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *product(["llama", "gemma2", "opt"], [LORA, PREFIX]),
        *((name, LORA.model_copy(update={"targets": INPUTS})) for name in HYBRIDS),
    ],
)
def test_rows_gradients_equal_those_of_each_row_alone(
    random_model, draw_examples, reference_loss, architecture, settings
):
    heads = {"num_key_value_heads": 4} if architecture == "opt" else {}
    if architecture == "opt":
        settings = settings.model_copy(update={"targets": "q_proj,v_proj"})
    model = with_effect(random_model(architecture, **heads), settings)
    examples = draw_examples(7)
    batch = collate(examples, 0)
    assert batch.lengths.min() < batch.lengths.max(), "no row is padded"
    found, loss = WholeModel(model).row_gradients(batch)
    assert_equal_rows(found, row_by_row(model, examples, reference_loss))
    assert loss == pytest.approx(WholeModel(model).summed_losses([batch])[0], rel=1e-6)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_recomputing_and_quantising_change_no_row(checkpoint, draw_examples, quantization):
    examples, found = draw_examples(5), {}
    for recomputes in (False, True):
        settings = ModelSettings(
            name=str(checkpoint), quantization=quantization, gradient_checkpointing=recomputes
        )
        model = with_effect(load_base_model(settings).model, LORA)
        whole = WholeModel(model)
        found[recomputes], _ = whole.row_gradients(collate(examples, 0))
        assert_equal_rows(
            found[recomputes], [whole.gradients_of(collate([row], 0)) for row in examples]
        )
    assert all(torch.equal(found[True][name], g) for name, g in found[False].items())


@pytest.mark.parametrize(("architecture", "module"), [("llama", "lm_head"), ("opt", "fc2")])
def test_modules_that_mix_rows_are_refused(random_model, draw_examples, architecture, module):
    settings = LORA.model_copy(update={"targets": f"q_proj,{module}"})
    model = WholeModel(with_effect(random_model(architecture), settings))
    with pytest.raises(BaseModelError, match=rf"{module}.*adapter\.targets"):
        model.row_gradients(collate(draw_examples(3), 0))


def test_experts_whose_gradients_would_be_zero_are_refused(random_model, draw_examples):
    """The model reads their weights without calling the modules that a hook replaces."""
    config = LoraConfig(target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    model = get_peft_model(random_model("mixtral"), config)
    with pytest.raises(BaseModelError, match=r"can't be computed in .*experts.*lora_A"):
        WholeModel(model).row_gradients(collate(draw_examples(3), 0))


@pytest.mark.parametrize("settings", [LORA, PREFIX], ids=["lora", "prefix"])
def test_a_step_matches_the_dp_sgd_formula(random_model, draw_examples, reference_loss, settings):
    model = with_effect(random_model(), settings)
    examples = draw_examples(9)
    rows = row_by_row(model, examples, reference_loss)
    norms = [math.sqrt(sum(float(g.square().sum()) for g in row.values())) for row in rows]
    bound = sorted(norms)[4]
    parameters = trainable_parameters(model)
    drawn: list[bytes] = []

    def recorded(count: int) -> bytes:
        drawn.append(np.random.default_rng(len(drawn)).bytes(count))
        return drawn[-1]

    private = PrivateGradients(
        WholeModel(model), parameters, Noise(0.5, bound, 4.0), lambda _: recorded
    )
    # Two micro-batches: clipping is by row, and noise is added once.
    private.accumulate([collate(examples[:6], 0), collate(examples[6:], 0)], seed=0)
    left = iter(drawn)
    for name, parameter in parameters.items():
        clipped = sum(
            row[name] * min(1, bound / norm) for row, norm in zip(rows, norms, strict=True)
        )
        noise = normal(parameter.numel(), lambda _: next(left)).view_as(parameter)
        expected = (clipped + 0.5 * bound * noise) / 4
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-5, atol=1e-6)
    assert next(left, None) is None
    # A step without rows contains only noise.
    private.accumulate([], seed=0)
    values = torch.cat([p.grad.flatten() for p in parameters.values()])
    assert values.std() == pytest.approx(0.5 * bound / 4, rel=0.1)


@pytest.mark.parametrize("settings", [LORA, PREFIX], ids=["lora", "prefix"])
def test_rows_in_groups_have_the_sum_of_all_at_once(random_model, draw_examples, settings):
    model = with_effect(random_model(), settings)
    examples = sorted(draw_examples(9), key=lambda example: -len(example.tokens))
    # A group without targets, as when no output fits.
    examples[4:6] = [replace(e, is_target=torch.zeros_like(e.is_target)) for e in examples[4:6]]
    batch = collate(examples, 0)
    parameters = trainable_parameters(model)
    one_row = 4 * sum(p.numel() for p in parameters.values())
    sums, losses, taken = {}, {}, []

    class Watched(WholeModel):
        def row_gradients(self, batch):
            taken.append(len(batch.tokens))
            return super().row_gradients(batch)

    for rows in (9, 2, 1, 0):
        private = PrivateGradients(
            Watched(model), parameters, Noise(0.0, 0.5, 1.0), max_bytes=rows * one_row
        )
        taken.clear()
        (losses[rows],) = private.accumulate([batch], seed=0)
        assert max(taken) == max(rows, 1), "the gradients take more memory than they may"
        sums[rows] = {name: p.grad for name, p in parameters.items()}
    for rows in (2, 1, 0):
        assert losses[rows] == pytest.approx(losses[9], rel=1e-6)
        for name, expected in sums[9].items():
            torch.testing.assert_close(sums[rows][name], expected, rtol=1e-5, atol=1e-6)


def test_each_step_has_its_own_noise_which_the_key_repeats(adapted, draw_examples):
    """A killed round is continued with the same key."""
    found: list[torch.Tensor] = []

    class Recording(PrivateGradients):
        def accumulate(self, *arguments: Any) -> list[float]:
            losses = super().accumulate(*arguments)
            found.append(torch.cat([p.grad.flatten() for p in parameters.values()]))
            return losses

    for _ in range(2):
        model = adapted()
        parameters, source = trainable_parameters(model), partial(secret_stream, bytes(32))
        private = Recording(WholeModel(model), parameters, Noise(1.0, 1.0, 2.0), source)
        local_round = LocalRound([[]] * 3, 0, 3, seed=0, deadline=time.monotonic() + 60)
        train_round(private, parameters, draw_examples(2), 0, local_round, TrainSettings())
    assert torch.equal(torch.stack(found[:3]), torch.stack(found[3:]))
    correlations = torch.corrcoef(torch.stack(found[:3]))
    torch.testing.assert_close(correlations, torch.eye(3), atol=0.15, rtol=0)


def test_a_loss_that_is_not_finite_is_reported_as_0(adapted, draw_examples):
    """Otherwise the round would end, and other parties would learn something about the row."""
    model = adapted()
    parameters = trainable_parameters(model)
    private = PrivateGradients(WholeModel(model), parameters, Noise(1.0, 1.0, 2.0))
    for parameter in parameters.values():
        parameter.data.fill_(math.inf)
    assert private.accumulate([collate(draw_examples(2), 0)], seed=0) == [0.0]
    assert all(parameter.grad.isfinite().all() for parameter in parameters.values())


def test_rows_without_a_finite_gradient_disturb_nothing():
    gradients = {
        "a": torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 1.0], [0.3, 0.4], [1e30, 0.0]]),
        "b": torch.tensor([[0.0], [0.0], [1.0], [0.0], [0.0]]),
    }
    sums = clipped_sums(gradients, row_norm=1.0)
    torch.testing.assert_close(sums["a"], torch.tensor([0.6 + 0.3 + 1, 0.8 + 0.4]))
    assert sums["b"].tolist() == [0.0]
    nothing = clipped_sums({"a": torch.zeros(3, 2)}, row_norm=1.0)
    assert nothing["a"].tolist() == [0.0, 0.0]


def test_draws_have_their_distributions():
    random = np.random.default_rng(0)
    values = normal(200_001, random.bytes)
    assert values.dtype == torch.float64 and len(values) == 200_001
    assert float(values.mean()) == pytest.approx(0, abs=0.01)
    assert float(values.std()) == pytest.approx(1, abs=0.01)
    for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert float((values.abs() < bound).double().mean()) == pytest.approx(share, abs=0.005)
    pairs = values[:100_000] * values[100_001:]
    assert float(pairs.mean()) == pytest.approx(0, abs=0.02), "halves are independent"
    even = uniform(100_000, random.bytes)
    assert float(even.min()) >= 0 and float(even.max()) < 1
    assert float(even.mean()) == pytest.approx(0.5, abs=0.01)
    assert normal(1, bytes).isfinite().all()
    assert normal(1, lambda count: b"\xff" * count).isfinite().all()


def test_each_row_is_drawn_independently_with_one_probability():
    steps = poisson_steps(40, 0.1, 5000, np.random.default_rng(0).bytes)
    taken = torch.zeros(5000, 40)
    for index, rows in enumerate(steps):
        assert len(set(rows)) == len(rows)
        taken[index, rows] = 1
    torch.testing.assert_close(taken.mean(0), torch.full((40,), 0.1), atol=0.02, rtol=0)
    # The number of rows is binomial; some steps have none.
    assert float(taken.sum(1).var()) == pytest.approx(40 * 0.1 * 0.9, rel=0.1)
    assert sum(not rows for rows in steps) / 5000 == pytest.approx(0.9**40, abs=0.01)
    assert poisson_steps(3, 1.0, 2) == [[0, 1, 2], [0, 1, 2]]


def test_the_seed_of_a_run_determines_neither_rows_nor_noise(adapted, draw_examples):
    examples, found = draw_examples(8), []
    for _ in range(2):
        model = adapted(dropout=0.5)
        parameters = trainable_parameters(model)
        private = PrivateGradients(WholeModel(model), parameters, Noise(1.0, 1.0, 2.0))
        local_round = LocalRound([[], [1, 2], []], 0, 3, seed=7, deadline=time.monotonic() + 60)
        report, _ = train_round(private, parameters, examples, 0, local_round, TrainSettings())
        assert len(report.losses) == 3
        found.append(export_adapter(model))
    assert not any(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert poisson_steps(100, 0.5, 1) != poisson_steps(100, 0.5, 1)
