"""Read a client's answers from the gradients that it sends.

In training, a client sends the gradient of its loss with respect to the tail's input, which it has
received from the server. The server knows the tail's input and its public weights. The tail is
causal, so the gradient at a token depends only on the token's label and on later labels. Answers
can therefore be read from the end: later labels are known, and without their contribution, the
gradient reveals the token's label. Neither the number of head blocks nor ``split.noise`` matters.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from finetuning.data.batching import MicroBatch
from finetuning.model.output_head import add_target_gradient
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.frames import Padding

_SHORTLIST = 64


def client_gradient(tail: Part, tail_input: Tensor, batch: MicroBatch) -> Tensor:
    """Compute the gradient that a client sends for a text, as in `SplitModel.accumulate`.

    ``tail_input`` are the hidden states from the server, (1, tokens, hidden).
    """
    middle = tail_input.clone().requires_grad_()
    add_target_gradient(
        head=tail.output_head,
        hidden=tail(middle, Padding("right", batch.lengths)),
        batch=batch,
        scale=1 / len(batch.labels),
    )
    assert middle.grad is not None  # every text has targets
    return middle.grad


def read_labels(
    tail: Part, tail_input: Tensor, gradient: Tensor, positions: Tensor, count: int
) -> Tensor:
    """Return the last ``count`` labels of a text, (count,) int64.

    ``tail_input`` are the hidden states that the server sent to the tail, and ``gradient`` what it
    received, (tokens, hidden) each. ``positions`` are the indices of the tokens before all targets,
    (targets,) int64. The output head of the public tail must be a matrix, without scaling or
    capping of logits.
    """
    tail.train(False)
    matrix = tail.model.get_output_embeddings().weight.detach().float()
    scale = 1 / len(positions)  # factor of each target's loss
    middle = tail_input[None].clone().requires_grad_()
    output = tail(middle, Padding("right", torch.tensor([len(tail_input)])))
    with torch.no_grad():
        chosen = output.detach()[:, positions]
        logits = tail.output_head(inputs_embeds=chosen, use_cache=False).logits[0]
    # Means of the matrix's rows, weighted by the predicted probabilities.
    probable = logits.float().softmax(-1) @ matrix
    # Gradient of the loss with respect to the tail's output, for the labels known so far.
    known = torch.zeros_like(output)
    last = positions[-count:].tolist()
    jacobians = _jacobians(tail, tail_input, last[0])
    labels: list[int] = []
    for position, row in zip(last[::-1], probable[-count:].flip(0), strict=True):
        known[0, position] = scale * row
        (computed,) = torch.autograd.grad(output, middle, known, retain_graph=True)
        # All that the label contributes is the gradient of its logit.
        difference = (computed[0, position] - gradient[position]) / scale
        label = _nearest(matrix, jacobians[position - last[0]], difference)
        known[0, position] -= scale * matrix[label]
        labels.append(label)
    return torch.tensor(labels[::-1])


def _jacobians(tail: Part, tail_input: Tensor, first: int) -> list[Tensor]:
    """Return the Jacobian of each token's output with respect to its own input, from ``first`` on.

    ``tail_input`` is the tail's input, (tokens, hidden). A Jacobian is (output, input).
    """
    kept = KeyValues(tail, Padding("left", torch.tensor([first])), first)
    with torch.no_grad():
        kept.extend(tail_input[None, :first])
    jacobians = []
    for token in torch.split(tail_input[None, first:], 1, dim=1):
        token.requires_grad_()
        output = kept.extend(token)
        directions = torch.eye(output.shape[-1])[:, None, None]
        (rows,) = torch.autograd.grad(output, token, directions, is_grads_batched=True)
        jacobians.append(rows[:, 0, 0])
    return jacobians


def _nearest(matrix: Tensor, jacobian: Tensor, difference: Tensor) -> int:
    """Return the token whose logit's gradient is nearest to ``difference``."""
    solved = torch.linalg.lstsq(jacobian.T, difference[:, None], driver="gelsd").solution[:, 0]
    similarity = normalize(matrix, dim=-1) @ solved
    candidates = similarity.topk(min(_SHORTLIST, len(matrix))).indices
    distances = (matrix[candidates] @ jacobian - difference).norm(dim=-1)
    return int(candidates[distances.argmin()])
