"""The attack on adapters distinguishes the only row of a round from rows outside it."""

import pytest

from bench.membership import measure
from finetuning.settings import ModelSettings


@pytest.mark.nightly
def test_the_only_row_of_a_round_is_recognised(checkpoint):
    (found,) = measure(ModelSettings(name=str(checkpoint)), seed=0, rounds=[1])
    assert found["gradient"] > 0.9 and found["loss"] > 0.6
