"""The continual-learning penalty and the importance of weights, compared with formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.adapters.adapter import trainable_parameters
from finetuning.training.continual import ContinualPenalty, importance, shuffle_importance
from finetuning.whole_model import WholeModel
from tests.finetuning.training.penalties import SHAPES, draw, flat, weights


def paper_penalty(w: torch.Tensor, anchor: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Compute Jᵀ|δ| + |δ|ᵀJᵀJ|δ| with J as a row and its outer product as a dense matrix."""
    delta = (w - anchor).abs()
    return j @ delta + delta @ torch.outer(j, j) @ delta


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.001, 10.0), st.booleans())
def test_value_and_gradient_equal_the_formula(seed, weight, has_gradient):
    parameters, anchor, j = weights(seed), draw(seed + 1), draw(seed + 2, positive=True)
    with torch.no_grad():
        parameters["a"][0, 1] = anchor["a"][0, 1]  # |δ| has no derivative here; 0 is used
    loss_gradient = draw(seed + 3)
    if has_gradient:
        for name, parameter in parameters.items():
            parameter.grad = loss_gradient[name].clone()
    penalty = ContinualPenalty(parameters, anchor, j, weight)

    w = flat(parameters).detach().requires_grad_()
    expected = weight * paper_penalty(w, flat(anchor), flat(j))
    (pull,) = torch.autograd.grad(expected, w)
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-5)
    s = (flat(j) * (w - flat(anchor)).abs()).sum().item()
    assert penalty.distance() == pytest.approx(s, rel=1e-5)
    found = penalty.add_gradient()
    total = pull + flat(loss_gradient) if has_gradient else pull
    torch.testing.assert_close(
        flat({n: p.grad for n, p in parameters.items()}), total, rtol=1e-4, atol=1e-5
    )
    theirs = flat(loss_gradient).norm() if has_gradient else 0.0
    share = float(pull.norm() / (pull.norm() + theirs))
    assert found == pytest.approx(share, rel=1e-4)


def test_the_sum_over_tensors_equals_the_published_code():
    parameters, anchor, j = weights(0), draw(1), draw(2, positive=True)
    penalty = ContinualPenalty(parameters, anchor, j, 0.7, over="tensor")
    w = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    expected = 0.7 * sum(
        0.5 * paper_penalty(w[n].flatten(), anchor[n].flatten(), j[n].flatten()) for n in SHAPES
    )
    expected.backward()
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-5)
    penalty.add_gradient()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, w[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("over", ["all", "tensor"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_target_share_is_reached_for_any_scale(over, scale):
    parameters, loss_gradient = weights(0), draw(3)
    for name, parameter in parameters.items():
        parameter.grad = loss_gradient[name].clone()
    j = {name: scale * value for name, value in draw(2, positive=True).items()}
    penalty = ContinualPenalty(parameters, draw(1), j, 1.0, share=0.3, over=over)
    assert penalty.add_gradient() == pytest.approx(0.3, rel=1e-5)
    pull = flat({n: p.grad - loss_gradient[n] for n, p in parameters.items()})
    theirs = flat(loss_gradient).norm()
    assert float(pull.norm() / (pull.norm() + theirs)) == pytest.approx(0.3, rel=1e-4)


def test_shuffling_moves_values_within_each_tensor():
    j = draw(2, positive=True)
    first, again, other = (
        shuffle_importance(j, 1),
        shuffle_importance(dict(reversed(j.items())), 1),
        shuffle_importance(j, 2),
    )
    for name, value in j.items():
        assert torch.equal(first[name].flatten().sort().values, value.flatten().sort().values)
        assert first[name].shape == value.shape
        assert torch.equal(first[name], again[name])
    assert not torch.equal(flat(first), flat(j))
    assert not torch.equal(flat(first), flat(other))


@pytest.mark.parametrize("shared", [False, True])
def test_anchor_and_importance_are_copies(shared):
    parameters, j = weights(0), draw(1, positive=True)
    # The anchor may share memory with the weights, which were loaded from it.
    anchor = {n: p.data if shared else p.data.clone() for n, p in parameters.items()}
    penalty = ContinualPenalty(parameters, anchor, j, 1.0)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.5)
    moved = penalty.distance()
    assert moved == pytest.approx(0.5 * float(flat(j).sum()), rel=1e-4)
    for name in SHAPES:
        j[name].zero_()
        if not shared:
            anchor[name].add_(7.0)
    assert penalty.distance() == moved


def test_without_weight_only_the_distance_is_measured():
    parameters, before = weights(0), draw(3)
    for name, parameter in parameters.items():
        parameter.grad = before[name].clone()
    penalty = ContinualPenalty(parameters, draw(1), draw(2, positive=True), 0.0)
    assert penalty.distance() > 0
    assert penalty.add_gradient() == penalty.value() == 0.0
    assert all(torch.equal(p.grad, before[name]) for name, p in parameters.items())


@pytest.mark.parametrize("training", [True, False])
def test_importance_equals_a_loop_and_leaves_the_model(
    adapted, draw_examples, batches_of, reference_loss, training
):
    model = adapted(dropout=0.5)
    examples = draw_examples(5)
    parameters = trainable_parameters(model)
    found = []
    model.eval()
    for example in examples:
        reference_loss(model, [example]).backward()
        found.append({name: p.grad for name, p in parameters.items()})
        for parameter in parameters.values():
            parameter.grad = None
    model.train(training)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    weights_before = {name: p.clone() for name, p in model.named_parameters()}
    j = importance(WholeModel(model), batches_of(examples, 1))
    assert all(module.training == training for module in model.modules())
    assert all((p.grad == 3.0).all() for p in parameters.values())
    after = dict(model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in weights_before.items())
    assert j.keys() == parameters.keys()
    for name, value in j.items():
        stacked = torch.stack([gradient[name] for gradient in found])
        expected = stacked.abs().mean(0)
        assert expected.any()
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)
