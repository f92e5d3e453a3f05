"""Training steps and rounds: compared with plain references, resumed, and stopped."""

import copy
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from finetuning.adapters.adapter import export_adapter, load_adapter, trainable_parameters
from finetuning.data.tokenization import Example
from finetuning.settings import TrainSettings
from finetuning.training.loop import DeadlineError, LocalRound, TrainingReport, train_round
from finetuning.training.optimization import OptimizerState, squared_norm
from finetuning.training.proximal import ProximalPenalty
from finetuning.whole_model import WholeModel
from tests.finetuning.conftest import ARCHITECTURES, HYBRIDS


def train(
    peft_model: Any,
    examples: Sequence[Example],
    steps: Sequence[Sequence[int]],
    settings: TrainSettings,
    *,
    state: OptimizerState | None = None,
    round_number: int = 1,
    rounds: int = 1,
    deadline: float = math.inf,
) -> tuple[TrainingReport, OptimizerState]:
    """Train one of several rounds of equal length."""
    local_round = LocalRound(
        steps, (round_number - 1) * len(steps), rounds * len(steps), round_number, deadline
    )
    return train_round(
        WholeModel(peft_model),
        trainable_parameters(peft_model),
        examples,
        0,
        local_round,
        settings,
        optimizer_state=state,
    )


def gradients(peft_model: Any) -> dict[str, torch.Tensor]:
    """Return a model's gradients, and remove them from it."""
    taken = {name: p.grad for name, p in trainable_parameters(peft_model).items()}
    for parameter in peft_model.parameters():
        parameter.grad = None
    return taken


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(value.abs().max()) for value in theirs.values())
    assert largest > 0
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_step_equals_the_library_own_forward_on_one_padded_batch(
    adapted, draw_examples, reference_loss, batches_of, architecture
):
    model = adapted(architecture)
    examples = draw_examples(7)
    loss = reference_loss(model, examples)
    loss.backward()
    expected = gradients(model)
    for budget in (10**6, 40, 1):  # one micro-batch, several, one for each example
        batches = batches_of(examples, budget)
        summed = WholeModel(model).accumulate(batches, seed=0)
        targets = sum(len(batch.labels) for batch in batches)
        assert sum(summed) / targets == pytest.approx(loss.item(), rel=1e-5)
        assert_close(gradients(model), expected)


@pytest.mark.parametrize(("kind", "maximum"), [("adam", 0.05), ("adam", 0.0), ("adamw", 0.05)])
def test_a_round_equals_plain_torch(adapted, draw_examples, reference_loss, kind, maximum):
    examples = draw_examples(12)
    steps = [[0, 5, 7, 2], [1, 3, 11, 4], [6, 8, 9, 10]]
    ours, reference = adapted(), adapted()
    settings = TrainSettings(
        optimizer=kind, learning_rate=1e-2, max_gradient_norm=maximum, weight_decay=0.1
    )
    report, _ = train(ours, examples, steps, settings)

    parameters = list(trainable_parameters(reference).values())
    library = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    optimizer = library(parameters, lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in steps:
        loss = reference_loss(reference, [examples[i] for i in step])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, maximum or math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    assert min(norms) > 0.05, "nothing was clipped"
    assert report.losses == pytest.approx(losses, rel=1e-4)
    assert report.gradient_norm == pytest.approx(sum(norms) / 3, rel=1e-3)
    assert report.tokens == sum(len(example.tokens) for example in examples)
    assert_close(export_adapter(ours), export_adapter(reference))


def test_a_penalty_is_clipped_with_the_loss(adapted, draw_examples, reference_loss):
    examples, settings = draw_examples(4), TrainSettings(max_gradient_norm=0.05)
    ours, reference = adapted(), adapted()
    parameters = trainable_parameters(ours)
    anchor = {name: p.detach() + 0.1 for name, p in parameters.items()}
    report, _ = train_round(
        WholeModel(ours),
        parameters,
        examples,
        0,
        LocalRound([range(4)], 0, 1, 1, math.inf),
        settings,
        penalty=ProximalPenalty(parameters, anchor, 5.0),
    )
    theirs = trainable_parameters(reference)
    distance = sum((p - anchor[name]).square().sum() for name, p in theirs.items())
    (reference_loss(reference, examples) + 2.5 * distance).backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.values(), math.inf)
    assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-4)


def test_squares_that_no_float32_holds_are_summed():
    gradients = [torch.full((3,), 1e20), torch.full((2, 2), -1e20)]
    assert squared_norm(gradients) == pytest.approx(7e40, rel=1e-5)


def test_gradients_left_by_an_interrupted_round_are_dropped(adapted, draw_examples):
    left, fresh = adapted(), adapted()
    for parameter in trainable_parameters(left).values():
        parameter.grad = torch.ones_like(parameter)
    for model in (left, fresh):
        train(model, draw_examples(3), [[0, 1, 2]], TrainSettings())
    theirs = export_adapter(fresh)
    assert all(torch.equal(value, theirs[name]) for name, value in export_adapter(left).items())


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_schedules_span_the_whole_run(adapted, draw_examples, schedule, warmup):
    settings = TrainSettings(learning_rate=1e-3, schedule=schedule, warmup_ratio=warmup)
    examples = draw_examples(2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler = get_scheduler(name, optimizer, round(warmup * 10), 10)
    unbroken = []
    for _ in range(10):
        unbroken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    model = adapted()
    ends = [
        train(model, examples, [[0]] * 2, settings, round_number=r, rounds=5)[0].learning_rate
        for r in range(1, 6)
    ]
    assert ends == pytest.approx(unbroken[1::2])


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_resumed_with_kept_optimizer_equals_unbroken_bit_for_bit(adapted, draw_examples, kind):
    settings = TrainSettings(
        optimizer=kind, optimizer_state="keep", learning_rate=1e-2, schedule="cosine"
    )
    examples = draw_examples(8)
    rounds = [[[0, 1, 2], [3, 4, 5]], [[6, 7, 0], [5, 1, 3]]]

    def run(model: Any, number: int, state: OptimizerState | None) -> tuple[Any, Any]:
        return train(
            model,
            examples,
            rounds[number - 1],
            settings,
            state=state,
            round_number=number,
            rounds=2,
        )

    unbroken = adapted(dropout=0.3)
    _, state = run(unbroken, 1, None)
    saved_adapter = export_adapter(unbroken)
    saved_state = copy.deepcopy(state)
    _, last = run(unbroken, 2, state)
    assert all(torch.equal(state[name], saved_state[name]) for name in state), "not a copy"

    resumed = adapted(dropout=0.3)
    load_adapter(resumed, saved_adapter)
    torch.rand(17)  # other code may draw random numbers
    _, resumed_last = run(resumed, 2, saved_state)
    theirs = export_adapter(unbroken)
    assert all(torch.equal(value, theirs[name]) for name, value in export_adapter(resumed).items())
    assert last.keys() == resumed_last.keys()
    assert all(torch.equal(last[name], resumed_last[name]) for name in last)

    forgetful = adapted(dropout=0.3)
    load_adapter(forgetful, saved_adapter)
    run(forgetful, 2, None)
    assert not all(torch.equal(v, theirs[n]) for n, v in export_adapter(forgetful).items())


def test_the_optimizer_state_of_another_adapter_is_refused(adapted, draw_examples):
    examples = draw_examples(2)
    _, state = train(adapted("gpt2"), examples, [[0]], TrainSettings())
    with pytest.raises(ValueError, match="a different adapter"):
        train(adapted(), examples, [[0]], TrainSettings(), state=state)


def test_a_deadline_names_the_setting_and_keeps_the_adapter(adapted, draw_examples):
    model = adapted()
    before = export_adapter(model)
    with pytest.raises(DeadlineError, match=r"0 of 3 steps.*round-timeout"):
        train(model, draw_examples(3), [[0], [1], [2]], TrainSettings(), deadline=time.monotonic())
    assert all(torch.equal(v, before[n]) for n, v in export_adapter(model).items())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_no_weights(adapted, draw_examples, value):
    model = adapted()
    model.get_base_model().lm_head.weight.data[3] = value
    before = export_adapter(model)
    with pytest.raises(FloatingPointError, match="step 1"):
        train(model, draw_examples(3), [[0, 1, 2]], TrainSettings())
    assert all(torch.equal(v, before[n]) for n, v in export_adapter(model).items())


@pytest.mark.parametrize("architecture", ["llama", *HYBRIDS])
def test_gradient_checkpointing_recomputes_and_changes_nothing(
    adapted, draw_examples, batches_of, architecture
):
    batches = batches_of(draw_examples(6), 50)
    results = []
    for checkpointing in (False, True):
        model = adapted(architecture, dropout=0.2)
        if checkpointing:
            model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        calls: list[int] = []
        modules = dict(model.get_base_model().model.layers[0].named_children())
        block = next(module for name, module in modules.items() if "norm" in name)
        block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        stages = WholeModel(model)
        losses = stages.accumulate(batches, seed=5)
        step = gradients(model)
        plain = stages.gradients_of(batches[0])  # without dropout
        assert len(calls) == (len(batches) + 1) * (2 if checkpointing else 1)
        results.append((losses, step, plain))
    assert results[0][0] == results[1][0]
    for ours, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_dropout_depends_on_the_seed_alone(adapted, draw_examples, batches_of):
    model = adapted(dropout=0.5)
    stages = WholeModel(model)
    first, second = batches_of(draw_examples(4), 10**6), batches_of(draw_examples(9, seed=1), 30)

    def step(batches: Any, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        return stages.accumulate(batches, seed), gradients(model)

    torch.manual_seed(1)
    before = step(first, 3)
    step(second, 4)
    torch.manual_seed(2)
    again = step(first, 3)
    other = step(first, 5)
    assert before[0] == again[0] != other[0]
    assert all(torch.equal(value, again[1][name]) for name, value in before[1].items())
    assert stages.summed_losses(first[:1]) == stages.summed_losses(first[:1])


def test_every_step_and_micro_batch_has_its_own_dropout(adapted, draw_examples, batches_of):
    model, examples = adapted(dropout=0.5), draw_examples(1)
    report, _ = train(model, examples, [[0], [0]], TrainSettings(learning_rate=1e-9))
    assert abs(report.losses[0] - report.losses[1]) > 1e-4
    one, other = WholeModel(model).accumulate(batches_of(examples, 100) * 2, seed=3)
    assert abs(one - other) > 1e-4
