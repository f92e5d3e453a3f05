"""The error of averaging LoRA's factors, compared with dense products."""

import pytest
import torch

from finetuning.aggregation.factor_error import factor_error, pair_factors


@pytest.mark.parametrize("clients", [2, 5])
def test_it_equals_the_error_of_dense_products(clients):
    generator = torch.Generator().manual_seed(clients)
    weights = {f"c{i}": i + 1 for i in range(clients)}
    modules, tensors = [], []
    for number, (inner, outer) in enumerate([(30, 20), (12, 40)]):
        a = {name: torch.randn(4, inner, generator=generator) for name in weights}
        b = {name: torch.randn(outer, 4, generator=generator) for name in weights}
        modules.append((a, b))
        tensors += [(f"x{number}.lora_A.weight", a), (f"x{number}.lora_B.weight", b)]
    wrong = exact = 0.0
    total = sum(weights.values())
    for a, b in modules:
        product = sum(w / total * b[n].double() @ a[n].double() for n, w in weights.items())
        means = [sum(w / total * each[n].double() for n, w in weights.items()) for each in (b, a)]
        wrong += float((product - means[0] @ means[1]).square().sum())
        exact += float(product.square().sum())
    error = factor_error(pair_factors(tensors), weights)
    assert error == pytest.approx((wrong / exact) ** 0.5, rel=1e-9)
    assert error > 0.1


def test_equal_factors_have_no_error():
    a, b = torch.randn(2, 9), torch.randn(7, 2)
    same = ("b", {"c": a, "d": a}, {"c": b, "d": 2 * b})
    assert factor_error([same], {"c": 1, "d": 3}) == pytest.approx(0, abs=1e-9)
    assert factor_error([("b", {"c": a}, {"c": 0 * b})], {"c": 1}) is None
    assert factor_error([], {"c": 1}) is None
