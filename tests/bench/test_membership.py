"""Attacks on adapters tell the only row of a round from others, and which tokens occur in rows."""

import pytest
import torch

from bench import tokens_told
from bench.membership import hidden_states, measure_membership, residual, space
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.batching import collate
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.leaks import area_under_curve
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel


@pytest.mark.nightly
def test_the_only_row_of_a_round_is_recognised(checkpoint):
    settings = ModelSettings(name=str(checkpoint))
    found = measure_membership(settings, seed=0, rank=8, rounds={1: 4})[1]
    for score in ("loss", "gradient"):
        own, others = (torch.cat(each) for each in (found[score].inside, found[score].outside))
        assert area_under_curve(own, others)[0] > (0.9 if score == "gradient" else 0.6)


@pytest.mark.nightly
def test_a_plain_gradient_contains_the_rows_hidden_states():
    base = load_base_model(ModelSettings(name="tiny"))
    torch.manual_seed(0)
    adapter = AdapterSettings(rank=48, alpha=48, dropout=0.0, targets="gate_proj")
    model = WholeModel(attach_adapter(base.model, adapter, None))
    for name, value in trainable_parameters(model.peft_model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    values = [{"instruction": text, "output": text} for text in ("Ab", "Xy")]
    rows = [Row(parse_messages(value), "", value) for value in values]
    first, second = (collate([each], 0) for each in tokenize(rows, base.tokenizer)[0])
    assert first.tokens.shape[1] <= 48 < base.model.config.hidden_size
    # In later blocks, tokens of which no answer's token depends have no gradient.
    gradients = model.gradients_of(first).items()
    spaces = {k: space(v) for k, v in gradients if "layers.0." in k and "lora_A" in k}
    own, other = (residual(hidden_states(model, each), spaces) for each in (first, second))
    assert own < 0.1 * other


@pytest.mark.nightly
def test_adapters_on_embeddings_and_output_heads_tell_tokens(checkpoint):
    found = tokens_told.measure_tokens(ModelSettings(name=str(checkpoint)), seed=0, rows=[1])
    for name in ("LoRA on embeddings", "LoRA on the output head"):
        ((right, occurring, wrong),) = found[name]
        assert right > 0.9 * occurring and not wrong
    assert found["LoRA on linear layers, rank 8, random"][0][0] == 0
