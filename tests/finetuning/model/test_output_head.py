"""The loss and its gradient, computed for a few targets at a time."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from finetuning.data.batching import MicroBatch
from finetuning.model.output_head import add_target_gradient, output_head, target_loss


def test_chunks_of_targets_equal_all_at_once(random_model):
    """With this vocabulary, a chunk has 32 of the 70 targets."""
    model = random_model(vocab_size=2**18, hidden_size=8, num_hidden_layers=1)
    model.requires_grad_(False)
    weight = model.lm_head.weight.requires_grad_()
    torch.manual_seed(0)
    hidden = torch.randn(2, 40, 8, requires_grad=True)
    positions = torch.randperm(80)[:70]
    labels, scales = torch.randint(2**18, (70,)), torch.rand(70)
    batch = MicroBatch(torch.zeros(2, 40).long(), torch.tensor([40, 40]), positions, labels)
    losses = cross_entropy(model.lm_head(hidden.flatten(0, 1)[positions]), labels, reduction="none")
    expected = torch.autograd.grad((losses * scales).sum(), [hidden, weight])

    loss = add_target_gradient(output_head(model), hidden, batch, scales)
    torch.testing.assert_close([hidden.grad, weight.grad], list(expected))
    assert float(loss) == pytest.approx(float(losses.sum()), rel=1e-6)
    assert float(target_loss(output_head(model), hidden, batch)) == pytest.approx(float(loss))
