"""Attacks on adapters tell the only row of a round from others, and which tokens occur in rows."""

import pytest

from bench import tokens_told
from bench.membership import measure_membership
from finetuning.settings import ModelSettings


@pytest.mark.nightly
def test_the_only_row_of_a_round_is_recognised(checkpoint):
    (found,) = measure_membership(ModelSettings(name=str(checkpoint)), seed=0, rounds=[1])
    assert found["gradient"] > 0.9 and found["loss"] > 0.6


@pytest.mark.nightly
def test_adapters_on_embeddings_and_output_heads_tell_tokens(checkpoint):
    found = tokens_told.measure_tokens(ModelSettings(name=str(checkpoint)), seed=0, rows=[1])
    for name in ("LoRA on embeddings", "LoRA on the output head"):
        ((right, occurring, wrong),) = found[name]
        assert right > 0.9 * occurring and not wrong
    assert found["LoRA on linear layers, rank 8, random"][0][0] == 0
