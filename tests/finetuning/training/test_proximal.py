"""FedProx's proximal term, compared with the paper's formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.training.proximal import ProximalPenalty

SHAPES = {"a": (2, 5), "b": (3,), "c": (4, 2)}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def weights(seed: int) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value) for name, value in draw(seed).items()}


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[name].flatten() for name in SHAPES])


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.001, 10.0), st.booleans())
def test_value_and_gradient_are_the_formula_s(seed, mu, has_gradient):
    parameters, anchor, loss_gradient = weights(seed), draw(seed + 1), draw(seed + 2)
    if has_gradient:
        for name, parameter in parameters.items():
            parameter.grad = loss_gradient[name].clone()
    penalty = ProximalPenalty(parameters, anchor, mu)

    w = flat(parameters).detach().requires_grad_()
    expected = mu / 2 * torch.linalg.vector_norm(w - flat(anchor)) ** 2
    (pull,) = torch.autograd.grad(expected, w)
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-5)
    assert penalty.distance() == pytest.approx(float((w - flat(anchor)).norm().detach()), rel=1e-5)
    share = penalty.add_gradient()
    found = flat({name: p.grad for name, p in parameters.items()})
    if has_gradient:
        torch.testing.assert_close(found, pull + flat(loss_gradient), rtol=1e-5, atol=1e-5)
    else:
        exact = {name: mu * (p.detach() - anchor[name]) for name, p in parameters.items()}
        assert torch.equal(found, flat(exact))
    theirs = flat(loss_gradient).norm() if has_gradient else 0.0
    assert share == pytest.approx(float(pull.norm() / (pull.norm() + theirs)), rel=1e-4)


def test_the_anchor_is_a_copy_even_of_the_weights_own_memory():
    parameters = weights(0)
    penalty = ProximalPenalty(parameters, {name: p.data for name, p in parameters.items()}, 1.0)
    assert penalty.distance() == penalty.value() == 0.0
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.5)
    count = sum(p.numel() for p in parameters.values())
    assert penalty.distance() == pytest.approx(0.5 * count**0.5)
