"""Arrange examples in optimizer steps and padded micro-batches."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from finetuning.data.tokenization import Example
from finetuning.devices import to_device_together
from finetuning.randomness import derive_seed
from finetuning.settings import TrainSettings

# Examples are sorted by length within groups of this many micro-batches.
_GROUPED_MICRO_BATCHES = 50


@dataclass(frozen=True)
class MicroBatch:
    """Examples that the model processes together, padded on the right.

    ``positions`` are indices in the flattened (rows · columns) hidden states of the token *before*
    each target; that token's hidden state predicts the target.
    """

    tokens: torch.Tensor  # (rows, columns) int64
    lengths: torch.Tensor  # (rows,) int64; number of tokens of each row without padding
    positions: torch.Tensor  # (targets,) int64
    labels: torch.Tensor  # (targets,) int64; the target tokens

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch with everything but the lengths on a device."""
        if self.tokens.device == device:
            return self
        tensors = (self.tokens, self.positions, self.labels)
        tokens, positions, labels = to_device_together(tensors, device)
        return replace(self, tokens=tokens, positions=positions, labels=labels)


def collate(examples: Sequence[Example], padding: int) -> MicroBatch:
    """Right-pad one or more examples to the length of the longest example."""
    tokens = torch.nn.utils.rnn.pad_sequence(
        [example.tokens for example in examples], batch_first=True, padding_value=padding
    )
    is_target = torch.nn.utils.rnn.pad_sequence(
        [example.is_target for example in examples], batch_first=True, padding_value=False
    )
    # The first token of a row can't be predicted, because no token precedes it.
    is_target[:, 0] = False
    flat = is_target.flatten().nonzero().squeeze(1)
    lengths = torch.tensor([len(example.tokens) for example in examples])
    return MicroBatch(
        tokens=tokens, lengths=lengths, positions=flat - 1, labels=tokens.flatten()[flat]
    )


def steps_per_round(examples: int, settings: TrainSettings) -> int:
    """Return the number of optimizer steps in a client's round."""
    return settings.local_steps or settings.epochs * _steps_per_epoch(examples, settings)


def round_steps(
    lengths: Sequence[int], settings: TrainSettings, round_number: int, seed: int
) -> list[list[int]]:
    """Return the indices of the examples in each optimizer step of a round.

    Each round continues where the last one ended, which can be inside an epoch (``local_steps``).
    Each epoch has its own order, in which examples of similar length are close together. Rounds are
    counted from 1. A step is a list of indices into ``lengths``, the examples' numbers of tokens.
    """
    per_epoch = _steps_per_epoch(len(lengths), settings)
    per_round = steps_per_round(len(lengths), settings)
    first, skipped = divmod((round_number - 1) * per_round, per_epoch)
    steps = [
        step
        for epoch in range(first, first + math.ceil((skipped + per_round) / per_epoch))
        for step in _epoch(lengths, settings, derive_seed("epoch", seed, epoch))
    ]
    return steps[skipped : skipped + per_round]


def micro_batches(
    indices: Sequence[int], columns: Sequence[int], token_budget: int, max_rows: int = sys.maxsize
) -> list[list[int]]:
    """Divide examples or prompts into batches of at most ``token_budget`` padded tokens.

    Examples are sorted by length, which reduces padding. The first batch has the longest examples,
    so out-of-memory errors occur immediately. An example above the budget is a batch by itself.
    ``indices`` are the examples' indices in ``columns``, the number of columns of each example:
    prefix, tokens, and tokens to be generated. A batch has at most ``max_rows`` rows.
    """
    groups: list[list[int]] = []
    last: list[int] = []
    for index in sorted(indices, key=lambda index: (-columns[index], index)):
        if last and len(last) < max_rows and (len(last) + 1) * columns[last[0]] <= token_budget:
            last.append(index)
        else:
            last = [index]
            groups.append(last)
    return groups


def split_rows(batch: MicroBatch, max_rows: int) -> list[MicroBatch]:
    """Split a micro-batch into parts of at most ``max_rows`` rows, padded to their longest row."""
    row, column = batch.positions // batch.tokens.shape[1], batch.positions % batch.tokens.shape[1]
    parts = []
    for first in range(0, len(batch.tokens), max_rows):
        rows = slice(first, first + max_rows)
        lengths = batch.lengths[rows]
        longest = int(lengths.max())
        own = (first <= row) & (row < first + max_rows)
        positions = (row[own] - first) * longest + column[own]
        parts.append(
            MicroBatch(
                tokens=batch.tokens[rows, :longest],
                lengths=lengths,
                positions=positions,
                labels=batch.labels[own],
            )
        )
    return parts


def _steps_per_epoch(examples: int, settings: TrainSettings) -> int:
    return math.ceil(examples / (settings.batch_size * settings.accumulation))


def _epoch(lengths: Sequence[int], settings: TrainSettings, seed: int) -> list[list[int]]:
    """Order an epoch: shuffle, sort by length within large groups, and shuffle the batches."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths)).tolist()
    size = settings.batch_size
    group = _GROUPED_MICRO_BATCHES * size
    batches: list[list[int]] = []
    for start in range(0, len(order), group):
        by_length = sorted(order[start : start + group], key=lambda index: -lengths[index])
        batches += [by_length[first : first + size] for first in range(0, len(by_length), size)]
    # Only the last batch can be short. Keep it last, so that every other step is full.
    short = [batches.pop()] if len(batches[-1]) < size else []
    batches = [batches[index] for index in random.permutation(len(batches))] + short
    in_step = settings.accumulation
    return [
        list(chain(*batches[first : first + in_step])) for first in range(0, len(batches), in_step)
    ]
