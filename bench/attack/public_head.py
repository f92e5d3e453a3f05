"""Read hidden states with the head's weights, without any training.

The head is causal: the hidden state of a token depends only on that token and the tokens before it.
So a text can be read from its beginning, token by token: the next token is the one for which the
head, given the tokens read so far, computes the received hidden state. For a head without blocks,
this is a search for the nearest embedding.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from split.model.part import Part
from split.protocol.frames import WireType

_CANDIDATES_AT_ONCE = 512
_SIMILAR = 64
_FREQUENT = 512
_FACTOR = 4
_INT8_STEPS = 127
# Relative rounding errors; with float32, those of matrix products, which depend on the machine.
_ROUNDING = {"bfloat16": 2.0**-9, "float32": 1e-4}
_MARGIN = 1.2


class PublicHead:
    """A search for the tokens from which the public head computes the received hidden states.

    All texts begin with the tokens ``beginning``, (known,) int64, at least one.
    """

    def __init__(self, head: Part, vocabulary: int, beginning: Tensor) -> None:
        head.train(False)
        self._head = head
        self._beginning = beginning
        # Each token's output right after the known beginning; ranks candidates at all positions.
        self._table = self._outputs(self._start(), len(beginning), torch.arange(vocabulary))
        self._center = self._table.mean(0)
        self._table -= self._center
        self._table /= self._table.norm(dim=-1, keepdim=True).clamp(min=1e-9)

    @torch.no_grad()
    def read(self, received: Tensor, wire: WireType, noise: float, most: int) -> Tensor:
        """Return the tokens of a text, (tokens,) int64.

        ``received`` is (tokens, hidden) after the known beginning. The wire type determines the
        rounding; the attacker can estimate the client's noise from a known beginning. ``most`` is
        the number of most similar candidates to try per token, in addition to frequent ones.
        """
        cache = self._start()
        tokens = []
        most = min(most, len(self._table))
        for length, hidden in enumerate(received, start=len(self._beginning)):
            expected = _expected_error(hidden, wire, noise)
            token = self._nearest(cache, length, hidden, expected, most)
            tokens.append(token)
            self._compute(cache, torch.tensor([[token]]))
        return torch.tensor(tokens)

    def _nearest(self, cache: Any, length: int, hidden: Tensor, expected: float, most: int) -> int:
        """Return the first candidate within the expected error, or else the nearest one."""
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
        """Yield the most similar tokens, then frequent tokens, then groups of less similar ones.

        Frequent tokens have the lowest ids, because BPE adds tokens in order of frequency. In
        deeper blocks, the hidden states of frequent tokens depend mainly on the text before them.
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
        cache = DynamicCache(config=self._head.model.config)
        self._compute(cache, self._beginning[None])
        return cache

    @torch.no_grad()
    def _compute(self, cache: Any, tokens: Tensor) -> None:
        self._head.model.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)

    @torch.no_grad()
    def _outputs(self, cache: Any, length: int, candidates: Tensor) -> Tensor:
        """Return the head's output for each candidate after ``length`` tokens in the cache.

        The output is (candidates, hidden). The candidates form one row, all at the same position;
        each attends only to the preceding text and to itself. The cache is left unchanged.
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
    """Return the largest error due to rounding and noise, relative to the received state."""
    if wire == "int8":
        largest = float(hidden.abs().max() / hidden.square().mean().sqrt())
        rounding = largest / _INT8_STEPS / math.sqrt(12)
    else:
        rounding = _ROUNDING[wire]
    return _MARGIN * math.hypot(rounding, noise / math.sqrt(1 + noise**2))
