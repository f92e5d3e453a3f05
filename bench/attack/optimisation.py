"""Inversion by optimisation: find embeddings that the public head maps to the received states.

The embeddings of a whole text are optimised by gradient descent, so that the head's hidden states
approach the received ones. Then each embedding is replaced by the nearest token. VFLAIR attacks
split models in this way. Unlike `bench.attack.public_head`, this attack needs no causal head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from split.model.part import Part

_LEARNING_RATE = 0.3  # relative to the standard deviation of the embeddings


def invert(
    head: Part, beginning: Tensor, received: Sequence[Tensor], steps: int, seed: int
) -> list[Tensor]:
    """Return the reconstructed tokens of each text.

    All texts begin with the tokens ``beginning``, (known,) int64. ``received`` contains (tokens,
    hidden) of each text, after the known beginning. Adam takes ``steps`` steps; ``seed`` determines
    the initial embeddings.
    """
    head.train(False)
    table = head.model.get_input_embeddings().weight.detach().float()
    scale = table.std()
    hidden = pad_sequence(list(received), batch_first=True)
    lengths = torch.tensor([len(row) for row in received])
    present = torch.arange(hidden.shape[1]) < lengths[:, None]
    size = hidden.square().sum(-1).clamp(min=1e-9)
    known = table[beginning].expand(len(received), -1, -1)
    generator = torch.Generator().manual_seed(seed)
    guess = table.mean(0) + scale * torch.randn(hidden.shape, generator=generator)
    guess.requires_grad_()
    optimizer = torch.optim.Adam([guess], lr=_LEARNING_RATE * float(scale))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        # Padding is on the right, so causal attention never reads it.
        output = head.model.base_model(
            inputs_embeds=torch.cat([known, guess], dim=1), use_cache=False
        ).last_hidden_state[:, len(beginning) :]
        distance = (output - hidden).square().sum(-1) / size
        (guess.grad,) = torch.autograd.grad(distance[present].sum(), guess)
        optimizer.step()
        schedule.step()
    similarity = normalize(guess.detach(), dim=-1) @ normalize(table, dim=-1).T
    return [row[:length] for row, length in zip(similarity.argmax(-1), lengths, strict=True)]
