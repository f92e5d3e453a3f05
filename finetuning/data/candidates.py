"""Arrange candidate answers in batches, so that a common beginning is processed only once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from finetuning.data.formats import DataError

# Indices of a group, of a continuation within the group, and of a token of the answer.
Owner = tuple[int, int, int]


@dataclass(frozen=True)
class Continuation:
    """A candidate answer and the context before it; each is (tokens,) int64 and not empty."""

    context: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class CandidateBatch:
    """Texts grouped by their common beginning, which is processed once.

    The n endings of a beginning are adjacent; n can be 0. Lengths are numbers of tokens without
    padding. ``positions`` are indices of the token *before* each target in the flattened hidden
    states, first of the beginnings, then of the endings.
    """

    beginnings: torch.Tensor  # (rows, columns) int64, padded on the left
    beginning_lengths: torch.Tensor  # (rows,) int64
    endings: torch.Tensor  # (rows · n, columns) int64, padded on the right
    ending_lengths: torch.Tensor  # (rows · n,) int64
    positions: torch.Tensor  # (targets,) int64
    labels: torch.Tensor  # (targets,) int64; the target tokens
    owners: list[Owner]  # the continuation and token that each target belongs to

    @property
    def endings_each(self) -> int:
        """Number of endings per beginning."""
        return len(self.endings) // len(self.beginnings)

    def tokens_kept(self, columns_before: int) -> int:
        """Return the number of padded tokens of a beginning with its endings and prefixes.

        Each ending needs its own copy of the beginning's keys and values.
        """
        columns = self.beginnings.shape[1], self.endings.shape[1]
        return _tokens_kept(self.endings_each, columns_before, *columns)


@dataclass
class _Unit:
    """One beginning with its endings."""

    beginning: torch.Tensor
    endings: list[torch.Tensor] = field(default_factory=list)
    # Index of an ending, index in the text of the token before the target, label, and owner.
    targets: list[tuple[int, int, int, Owner]] = field(default_factory=list)

    @property
    def columns(self) -> tuple[int, int]:
        """Numbers of tokens of the beginning and of the longest ending."""
        return len(self.beginning), max(map(len, self.endings), default=0)


def candidate_batches(
    groups: Sequence[Sequence[Continuation]], padding: int, columns_before: int, max_tokens: int
) -> list[CandidateBatch]:
    """Arrange groups of continuations in batches.

    The longest common beginning of a group's texts is processed once. Texts that differ only in
    their last token are also processed once, because the same hidden state predicts both tokens.
    A batch has at most ``max_tokens`` padded tokens, including the ``columns_before`` prefix
    positions before each row's tokens. Raise a DataError if a text does not fit.
    """
    units: list[_Unit] = []
    for number, group in enumerate(groups):
        units += _units(number, group, columns_before=columns_before, max_tokens=max_tokens)
    # The largest batches come first, so that out-of-memory errors occur immediately.
    units.sort(key=lambda unit: (-len(unit.endings), *(-size for size in unit.columns)))
    chosen: list[list[_Unit]] = []
    for unit in units:
        if chosen and len(chosen[-1][0].endings) == len(unit.endings):
            together = [*chosen[-1], unit]
            sizes = [other.columns for other in together]
            columns = max(size for size, _ in sizes), max(size for _, size in sizes)
            each = _tokens_kept(len(unit.endings), columns_before, *columns)
            if len(together) * each <= max_tokens:
                chosen[-1] = together
                continue
        chosen.append([unit])
    return [_batch(units, padding) for units in chosen]


def _tokens_kept(endings: int, columns_before: int, beginning: int, ending: int) -> int:
    return max(endings, 1) * (columns_before + beginning + max(ending, 1))


def _units(
    number: int, group: Sequence[Continuation], columns_before: int, max_tokens: int
) -> list[_Unit]:
    """Divide a group's texts into their common beginning and their endings."""
    # The last token is omitted, because it predicts nothing.
    texts = [(*c.context.tolist(), *c.answer.tolist()[:-1]) for c in group]
    distinct = sorted(dict.fromkeys(texts), key=len, reverse=True)
    longest = len(distinct[0])
    each = _tokens_kept(endings=1, columns_before=columns_before, beginning=longest, ending=1)
    if each > max_tokens:
        raise DataError(
            f"a text of {longest} tokens takes {each} with its prefix and answer, but at most "
            f"{max_tokens} can be processed at once"
        )
    shared = len(os.path.commonprefix(distinct))  # noqa: RUF071 - works for all sequences
    longer = [text for text in distinct if len(text) > shared]
    if shared and len(longer) > 1:
        at_once = max_tokens // each
        chunks = (longer[i : i + at_once] for i in range(0, len(longer), at_once))
        divided = [(distinct[0][:shared], chunk) for chunk in chunks]
    else:
        divided = [(text, []) for text in (distinct[:1] if shared else distinct)]
    units = []
    places: dict[tuple[int, ...], tuple[_Unit, int]] = {}
    for beginning, endings in divided:
        rests = [torch.tensor(text[len(beginning) :]) for text in endings]
        unit = _Unit(torch.tensor(beginning), rests)
        units.append(unit)
        places |= {text: (unit, index) for index, text in enumerate(endings or [beginning])}
    for candidate, (text, continuation) in enumerate(zip(texts, group, strict=True)):
        # A text without an entry equals the common beginning, which every unit contains.
        unit, ending = places.get(text, (units[0], 0))
        first = len(continuation.context) - 1
        for token, label in enumerate(continuation.answer.tolist()):
            unit.targets.append((ending, first + token, label, (number, candidate, token)))
    return units


def _batch(units: Sequence[_Unit], padding: int) -> CandidateBatch:
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_value=padding)
    beginnings = pad([unit.beginning for unit in units], padding_side="left")
    endings = [ending for unit in units for ending in unit.endings]
    padded = pad(endings) if endings else torch.zeros(0, 0, dtype=torch.int64)
    positions, labels, owners = [], [], []
    columns = beginnings.shape[1]
    for row, unit in enumerate(units):
        length = len(unit.beginning)
        for ending, position, label, owner in unit.targets:
            if position < length:
                index = row * columns + columns - length + position
            else:
                line = row * len(unit.endings) + ending
                index = beginnings.numel() + line * padded.shape[1] + position - length
            positions.append(index)
            labels.append(label)
            owners.append(owner)
    return CandidateBatch(
        beginnings=beginnings,
        beginning_lengths=torch.tensor([len(unit.beginning) for unit in units]),
        endings=padded,
        ending_lengths=torch.tensor([len(ending) for ending in endings], dtype=torch.int64),
        positions=torch.tensor(positions),
        labels=torch.tensor(labels),
        owners=owners,
    )
