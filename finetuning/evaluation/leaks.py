"""What an adapter gives away about the rows that it was trained on.

*Membership*: how well the ratio of a row's loss to the base model's loss tells training rows from
other rows (Yeom et al., 2018, with the base model as the reference). *Extraction*: of the spans of
a row's answers that occur in none of the other rows, the one that surprises the base model most is
extracted if greedy decoding generates it, given the text before it (Carlini et al., 2021).
*Exposure* of a planted canary (Carlini et al., 2019): its rank among random texts of the same form.
"""

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.data.tokenization import Example
from finetuning.evaluation.log_probabilities import log_probabilities
from finetuning.whole_model import WholeModel

SPAN = 8  # tokens; about two words and a number
_FALSE_POSITIVES = 0.01
_ALTERNATIVES = 999  # random texts that a canary is compared with
_MAX_TOKENS = 8192


@dataclass(frozen=True)
class Leaks:
    """What an adapter gives away.

    Attributes:
        members: Number of training rows that were scored.
        others: Number of other rows.
        auc: Probability that a training row has a higher score than another row; 0.5 is a guess.
        auc_low, auc_high: Its 95 % confidence interval (DeLong et al., 1988).
        recognised: Share of training rows that are recognised at 1 % false positives.
        spans: Number of training rows with a span of ``SPAN`` tokens that no other row has.
        extracted: Number of these whose span is generated.
        other_spans, other_extracted: The same for the other rows, as a control.

    """

    members: int
    others: int
    auc: float
    auc_low: float
    auc_high: float
    recognised: float
    spans: int
    extracted: int
    other_spans: int
    other_extracted: int

    def exceeded(self, max_auc: float | None, max_extracted: float | None) -> list[str]:
        """Return a line for each threshold that is exceeded; None is no threshold."""
        share = self.extracted / self.spans if self.spans else 0.0
        found = (("max-auc", self.auc, max_auc), ("max-extracted", share, max_extracted))
        return [
            f"{name} = {limit:g}, but it is {value:.3f}"
            for name, value, limit in found
            if limit is not None and value > limit
        ]


@dataclass(frozen=True)
class _Scores:
    """Scores of a row's targets, each (targets,)."""

    values: torch.Tensor  # log-probabilities in nats
    is_greedy: torch.Tensor  # whether the target is the likeliest token


@dataclass(frozen=True)
class RowLeaks:
    """What an adapter gives away about single rows.

    Attributes:
        inside, outside: Scores of the training rows and of the others; higher for rows that the
            adapter seems to know.
        extracted, other_extracted: For each row, whether its rarest span is generated, or None if
            it has none.

    """

    inside: torch.Tensor
    outside: torch.Tensor
    extracted: Sequence[bool | None]
    other_extracted: Sequence[bool | None]


def row_leaks(
    model: WholeModel, members: Sequence[Example], others: Sequence[Example], padding: int
) -> RowLeaks:
    """Measure what a model's adapter gives away about each row; see ``measure_leaks``."""
    examples, count = [*members, *others], len(members)
    with model.without_adapter():
        before = _scores(model, examples, padding)
    after = _scores(model, examples, padding)
    ratios = [
        float(new.values.mean() / old.values.mean().clamp(max=-1e-6))
        for old, new in zip(before, after, strict=True)
    ]
    scores = -torch.tensor(ratios, dtype=torch.float64)
    return RowLeaks(
        scores[:count],
        scores[count:],
        [*map(_extracts, before[:count], after[:count], _rare(members, others))],
        [*map(_extracts, before[count:], after[count:], _rare(others, members))],
    )


def measure_leaks(
    model: WholeModel, members: Sequence[Example], others: Sequence[Example], padding: int
) -> Leaks:
    """Measure what a model's adapter gives away about ``members``, compared with ``others``.

    ``others`` are rows of the same kind that the adapter was not trained on.
    """
    found = row_leaks(model, members, others, padding)
    auc, low, high = area_under_curve(found.inside, found.outside)
    return Leaks(
        members=len(members),
        others=len(others),
        auc=auc,
        auc_low=low,
        auc_high=high,
        recognised=share_recognised(found.inside, found.outside),
        spans=sum(each is not None for each in found.extracted),
        extracted=sum(map(bool, found.extracted)),
        other_spans=sum(each is not None for each in found.other_extracted),
        other_extracted=sum(map(bool, found.other_extracted)),
    )


def share_recognised(inside: torch.Tensor, outside: torch.Tensor) -> float:
    """Return the share of training rows that are recognised at 1 % false positives."""
    threshold = outside.sort(descending=True).values[math.floor(_FALSE_POSITIVES * len(outside))]
    return float((inside > threshold).double().mean())


def exposure(model: WholeModel, before: torch.Tensor, canaries: Sequence[torch.Tensor]) -> float:
    """Return a canary's exposure in bits: log₂ of the number of texts, less log₂ of its rank.

    ``before`` are the tokens of the text before the canary. ``canaries[0]`` are the tokens of the
    canary, the others those of random texts of the same form. If the model doesn't know the canary,
    the exposure is about 1; it is at most log₂ of the number of texts.
    """
    texts = [Continuation(before, each) for each in canaries]
    (found,) = log_probabilities(model, [texts], padding=0, max_tokens=_MAX_TOKENS)
    rank = 1 + sum(each.log_probability > found[0].log_probability for each in found[1:])
    return math.log2(len(found)) - math.log2(rank)


def alternatives(canary: str, seed: int = 0) -> list[str]:
    """Return the canary, and random texts in which each digit and letter is drawn again."""
    draw = random.Random(seed)

    def other(character: str) -> str:
        for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
            if character in kind:
                return draw.choice(kind)
        return character

    return [canary, *("".join(map(other, canary)) for _ in range(_ALTERNATIVES))]


def area_under_curve(inside: torch.Tensor, outside: torch.Tensor) -> tuple[float, float, float]:
    """Return the area under the ROC curve of two sets of scores, and its 95 % interval."""
    above = are_above(inside, outside)
    auc = float(above.mean())
    variance = 0.0
    for axis, count in ((1, len(inside)), (0, len(outside))):
        if count > 1:
            variance += float(above.mean(axis).var()) / count
    half = NormalDist().inv_cdf(0.975) * math.sqrt(variance)
    return auc, max(0.0, auc - half), min(1.0, auc + half)


def are_above(inside: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Return whether each score is above each other one, (inside, outside); 0.5 if they tie."""
    return (inside[:, None] > outside).double() + 0.5 * (inside[:, None] == outside).double()


def _rare(examples: Sequence[Example], others: Sequence[Example]) -> list[torch.Tensor]:
    """Return for each example whether the span from each target on occurs in no other row."""
    known = {span for example in others for span in _spans(example)}
    return [torch.tensor([span not in known for span in _spans(each)]) for each in examples]


def _spans(example: Example) -> list[tuple[int, ...]]:
    """Return the text of ``SPAN`` targets from each target on."""
    targets = example.tokens[1:][example.is_target[1:]].tolist()
    return [tuple(targets[at : at + SPAN]) for at in range(len(targets) - SPAN + 1)]


def _extracts(before: _Scores, after: _Scores, is_rare: torch.Tensor) -> bool | None:
    """Return whether a row's rarest span is generated, but not by the base model.

    Return None if it has none.
    """
    if not is_rare.any():
        return None
    surprise = before.values.unfold(0, SPAN, 1).sum(1).masked_fill(~is_rare, math.inf)
    start = int(surprise.argmin())
    span = slice(start, start + SPAN)
    return bool(after.is_greedy[span].all()) and not bool(before.is_greedy[span].all())


def _scores(model: WholeModel, examples: Sequence[Example], padding: int) -> list[_Scores]:
    first = [max(1, int(example.is_target.nonzero()[0])) for example in examples]
    groups = [
        [Continuation(example.tokens[:at], example.tokens[at:])]
        for at, example in zip(first, examples, strict=True)
    ]
    longest = max(len(example.tokens) for example in examples) + model.columns_before + 1
    sizes = [len(example.tokens) - at for at, example in zip(first, examples, strict=True)]
    values = [torch.zeros(size) for size in sizes]
    greedy = [torch.zeros(size, dtype=torch.bool) for size in sizes]
    batches = candidate_batches(groups, padding, model.columns_before, max(_MAX_TOKENS, longest))
    for batch in batches:
        found, _, best = model.log_probabilities(batch)
        is_best = (found >= best[:, 0]).cpu()
        for (row, _, token), value, likeliest in zip(
            batch.owners, found.cpu(), is_best, strict=True
        ):
            values[row][token], greedy[row][token] = value, likeliest
    kept = [example.is_target[at:] for at, example in zip(first, examples, strict=True)]
    return [_Scores(v[k], g[k]) for v, g, k in zip(values, greedy, kept, strict=True)]
