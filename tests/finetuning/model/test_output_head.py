"""The loss and its gradient, computed for a few targets at a time."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from finetuning.data.batching import MicroBatch
from finetuning.model.output_head import (
    add_target_gradient,
    output_head,
    target_log_probabilities,
    target_loss,
)


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


@torch.no_grad()
@pytest.mark.parametrize("casts", [False, True])
def test_scores_of_a_bfloat16_head_are_float32(random_model, casts):
    """The matrix is converted in three parts. Some models convert the hidden states to its type."""
    model = random_model(
        "cohere", vocab_size=2**16 + 5, hidden_size=128, num_hidden_layers=1
    ).bfloat16()
    if casts:
        convert = model.lm_head.forward
        model.lm_head.forward = lambda given: convert(given.bfloat16())
    chosen, labels = torch.randn(5, 128).bfloat16(), torch.randint(2**16, (5,))
    logits = chosen.double() @ model.lm_head.weight.double().T * model.config.logit_scale
    found, likeliest, _ = target_log_probabilities(output_head(model), chosen, labels)
    expected = -cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert likeliest[:, 0].tolist() == logits.argmax(-1).tolist()
