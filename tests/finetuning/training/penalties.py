"""Weights and gradients for the tests of penalties."""

import torch

SHAPES = {"a": (2, 5), "b": (3,), "c": (4, 2)}


def draw(seed: int, positive: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    return {name: value.abs() if positive else value for name, value in values.items()}


def weights(seed: int) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(value) for name, value in draw(seed).items()}


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values[name].flatten() for name in SHAPES])
