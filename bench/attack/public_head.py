"""An attacker who knows the head's weights reads its hidden states without any training.

The head is causal: the hidden state of a token depends on it and on the tokens before it alone. So
a text can be read from its beginning, token by token: of all tokens of the vocabulary, the next one
is that with which the head, given what has been read so far, computes what was received. Without
blocks this is looking up the nearest embedding.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from split.model.part import Part
from split.protocol.frames import WireType

_CANDIDATES_AT_ONCE = 512
_SIMILAR = 64
_FREQUENT = 512
_FACTOR = 4
_INT8_STEPS = 127
_BFLOAT16_ROUNDING = 2.0**-9
_FLOAT32_ROUNDING = 1e-4  # of other products of matrices than the client's
_MARGIN = 1.2


class PublicHead:
    """The search through one head.

    Args:
        head: The public head.
        vocabulary: Number of tokens.
        beginning: Tokens that all texts begin with, (known,) int64, at least one.

    """

    def __init__(self, head: Part, vocabulary: int, beginning: Tensor) -> None:
        head.train(False)
        self._head = head
        self._beginning = beginning
        # Every token after the known beginning: what tokens far from there come near to.
        self._table = self._outputs(self._start(), len(beginning), torch.arange(vocabulary))
        self._center = self._table.mean(0)
        self._table -= self._center
        self._table /= self._table.norm(dim=-1, keepdim=True).clamp(min=1e-9)

    @torch.no_grad()
    def read(self, received: Tensor, wire: WireType, noise: float, most: int) -> Tensor:
        """Return the tokens of a text, (tokens,) int64.

        Args:
            received: (tokens, hidden) after the known beginning.
            wire: How they were sent, from which the attacker knows their rounding.
            noise: The client's noise, which the attacker can estimate from a known beginning.
            most: Most similar candidates to compute for a token, besides frequent ones.

        """
        cache = self._start()
        tokens = []
        most = min(most, len(self._table))
        for length, hidden in enumerate(received, start=len(self._beginning)):
            expected = _expected_error(hidden, wire, noise)
            token = self._nearest(
                cache=cache, length=length, hidden=hidden, expected=expected, most=most
            )
            tokens.append(token)
            self._compute(cache, torch.tensor([[token]]))
        return torch.tensor(tokens)

    def _nearest(self, cache: Any, length: int, hidden: Tensor, expected: float, most: int) -> int:
        """Return the best candidate, or the first that is as near as the expected error."""
        best, least = -1, math.inf
        for candidates in self._candidates(hidden, most):
            outputs = self._outputs(cache, length, candidates)
            distances = (outputs - hidden).norm(dim=-1) / hidden.norm()
            smallest, index = distances.min(0)
            if float(smallest) < least:
                best, least = int(candidates[index]), float(smallest)
            if least <= expected:
                break
        return best

    def _candidates(self, hidden: Tensor, most: int) -> Iterator[Tensor]:
        """Yield groups of tokens: the most similar ones, frequent ones, and then more and more.

        Frequent tokens have the lowest numbers, since BPE adds tokens in the order of frequency.
        In deeper blocks they are the ones that depend on the text before them more than on
        themselves.
        """
        order = (self._table @ (hidden - self._center)).topk(most).indices
        yield order[:_SIMILAR]
        yield torch.arange(min(_FREQUENT, len(self._table)))
        begin = size = _SIMILAR
        while begin < len(order):
            size *= _FACTOR
            yield order[begin : begin + size]
            begin += size

    def _start(self) -> Any:
        """Return the keys and values of the known beginning."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._head.model.config)
        self._compute(cache, self._beginning[None])
        return cache

    @torch.no_grad()
    def _compute(self, cache: Any, tokens: Tensor) -> None:
        self._head.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def _outputs(self, cache: Any, length: int, candidates: Tensor) -> Tensor:
        """Return the head's output for each candidate after ``length`` tokens in the cache.

        It has the shape (candidates, hidden). The candidates are one row at the same position, of
        which each attends to the text before and to itself; the cache is the same afterwards.
        """
        outputs = []
        for group in torch.split(candidates, _CANDIDATES_AT_ONCE):
            before = torch.zeros(len(group), length)
            others = torch.full((len(group), len(group)), torch.finfo(torch.float32).min)
            mask = torch.cat([before, others.fill_diagonal_(0.0)], dim=1)
            result = self._head.model.base_model(
                input_ids=group[None],
                attention_mask=mask[None, None],
                position_ids=torch.full((1, len(group)), length),
                past_key_values=cache,
                use_cache=True,
            )
            outputs.append(result.last_hidden_state[0])
            cache.crop(-len(group))
        return torch.cat(outputs)


def _expected_error(hidden: Tensor, wire: WireType, noise: float) -> float:
    """Return the largest error that rounding and noise explain, relative to what was received."""
    rounding = _FLOAT32_ROUNDING
    if wire == "bfloat16":
        rounding = _BFLOAT16_ROUNDING
    if wire == "int8":
        largest = float(hidden.abs().max() / hidden.square().mean().sqrt())
        rounding = largest / _INT8_STEPS / math.sqrt(12)
    return _MARGIN * math.hypot(rounding, noise / math.sqrt(1 + noise**2))
