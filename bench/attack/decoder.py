"""A decoder that learns from a colluding client to read hidden states (FL-GLM section 4.3.3).

As in the paper, the decoder is a linear layer, or a Transformer with one block that sees all hidden
states of a text. Its output vocabulary consists of the colluding client's tokens, because it can't
learn any others.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

DecoderKind = Literal["linear", "transformer"]
_MAX_COLUMNS = 256
_ROWS = 16  # number of texts per optimizer step
_WIDTH = 256  # hidden size of the Transformer block
_LEARNING_RATE = 2e-3  # initial rate of AdamW; it decreases linearly to zero


class Decoder(nn.Module):
    """Predict the token at each position from a text's hidden states.

    ``seen`` contains the colluding client's hidden states, (tokens, features) for each text, and
    ``vocabulary`` contains the tokens that the decoder can output, (tokens,) int64.
    """

    def __init__(self, kind: DecoderKind, seen: Sequence[Tensor], vocabulary: Tensor) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        # Normalise, because some features of a model are a thousand times as large as others.
        everything = torch.cat(list(seen))
        self._mean = everything.mean(0)
        self._deviation = everything.std(0) + 1e-6
        features = everything.shape[1]
        self._block: nn.Module | None = None
        if kind == "linear":
            self._output = nn.Linear(features, len(vocabulary))
            return
        self._input = nn.Linear(features, _WIDTH)
        self._positions = nn.Embedding(_MAX_COLUMNS, _WIDTH)
        nn.init.normal_(self._positions.weight, std=0.02)
        self._block = nn.TransformerEncoderLayer(
            d_model=_WIDTH,
            nhead=4,
            dim_feedforward=2 * _WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self._norm = nn.LayerNorm(_WIDTH)
        self._output = nn.Linear(_WIDTH, len(vocabulary))

    def forward(self, seen: Tensor, padding: Tensor) -> Tensor:
        """Return logits over the vocabulary, (rows, columns, tokens of the vocabulary).

        ``seen`` is (rows, columns, features); ``padding`` (rows, columns) bool, true for padding.
        """
        scaled = (seen - self._mean) / self._deviation
        if self._block is None:
            return self._output(scaled)  # type: ignore[no-any-return]
        states = self._input(scaled) + self._positions.weight[: seen.shape[1]]
        states = self._block(states, src_key_padding_mask=padding)
        return self._output(self._norm(states))  # type: ignore[no-any-return]

    @torch.no_grad()
    def read(self, seen: Sequence[Tensor]) -> list[Tensor]:
        """Return the most probable tokens of each text."""
        texts = []
        for row in seen:
            logits = self(row[None], torch.zeros(1, len(row), dtype=torch.bool))
            texts.append(self.vocabulary[logits[0].argmax(-1)])
        return texts


def train_decoder(
    seen: Sequence[Tensor], texts: Sequence[Tensor], kind: DecoderKind, seed: int, passes: int = 4
) -> Decoder:
    """Train a decoder on the colluding client's hidden states and tokens.

    ``seen`` contains each text's hidden states, (tokens, features), and ``texts`` its tokens. The
    seed determines the initial weights and the order of the texts in each of the ``passes``.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = torch.unique(torch.cat(list(texts)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = Decoder(kind, seen, vocabulary)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=_LEARNING_RATE)
    orders = [torch.randperm(len(texts), generator=generator) for _ in range(passes)]
    groups = [group for order in orders for group in torch.split(order, _ROWS)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(groups))
    for group in groups:
        inputs = pad_sequence([seen[i] for i in group], batch_first=True)
        tokens = pad_sequence([texts[i] for i in group], batch_first=True, padding_value=-1)
        padding = tokens == -1
        labels = torch.searchsorted(vocabulary, tokens[~padding])
        loss = cross_entropy(decoder(inputs, padding)[~padding], labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return decoder
