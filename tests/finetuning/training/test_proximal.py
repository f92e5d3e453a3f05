"""FedProx's proximal term, compared with the paper's formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.training.proximal import ProximalPenalty
from tests.finetuning.training.penalties import draw, flat, weights


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.001, 10.0), st.booleans())
def test_value_and_gradient_equal_the_formula(seed, mu, has_gradient):
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
