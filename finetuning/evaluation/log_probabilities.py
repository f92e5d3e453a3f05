"""Log-probabilities of candidate answers, with a whole or a split model."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.model.interface import TextModel
from finetuning.progress import progress_bar


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of an answer after its context.

    ``log_probability`` is the sum over the answer's tokens, in nats (FL-GLM section 4.1.2), and
    ``is_greedy`` says whether greedy decoding would generate the answer.
    """

    log_probability: float
    is_greedy: bool


def log_probabilities(
    model: TextModel, groups: Sequence[Sequence[Continuation]], padding: int, max_tokens: int
) -> list[list[Likelihood]]:
    """Compute the likelihood of each continuation of each group.

    A group's continuations should have a common beginning, such as the candidate answers of a
    question; the common beginning is processed once. At most ``max_tokens`` padded tokens, prefixes
    included, are processed at once. Raise a DataError if a text does not fit into ``max_tokens``.
    """
    sums = [[0.0] * len(group) for group in groups]
    greedy = [[True] * len(group) for group in groups]
    batches = candidate_batches(groups, padding, model.columns_before, max_tokens)
    with progress_bar(total=sum(map(len, groups)), description="scoring") as bar:
        for batch in batches:
            values, likeliest = model.log_probabilities(batch)
            for (group, candidate, token), value, is_likeliest in zip(
                batch.owners, values.tolist(), likeliest.tolist(), strict=True
            ):
                sums[group][candidate] += value
                greedy[group][candidate] &= is_likeliest
                bar.update(token == 0)
    return [
        [Likelihood(*both) for both in zip(*of_group, strict=True)]
        for of_group in zip(sums, greedy, strict=True)
    ]
