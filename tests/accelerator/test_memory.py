"""What fits in a device's memory, and what happens where something doesn't."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from finetuning.devices import default_device, default_dtype
from finetuning.model.output_head import output_head, target_log_probabilities

pytestmark = pytest.mark.accelerator


def test_weights_are_bfloat16_only_where_a_device_has_it(device):
    assert default_dtype(default_device()) is torch.bfloat16
    device.has_bfloat16 = False
    try:
        assert default_dtype(default_device()) is torch.float32
    finally:
        device.has_bfloat16 = True


@torch.no_grad()
def test_scoring_makes_no_float32_copy_of_the_output_head(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2**17, hidden_size=256, intermediate_size=64, num_hidden_layers=1
    )
    model = LlamaForCausalLM(config).to(default_device(), torch.bfloat16)
    chosen = torch.randn(4, 256, device=model.device, dtype=torch.bfloat16)
    labels = torch.arange(4)
    device.peak(0)
    before = device.used(0)
    found, _ = target_log_probabilities(output_head(model), chosen, labels)
    assert device.peak(0) - before < 2**25 < 4 * model.lm_head.weight.numel() / 2
    logits = chosen.cpu().double() @ model.lm_head.weight.cpu().double().T
    expected = -cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
