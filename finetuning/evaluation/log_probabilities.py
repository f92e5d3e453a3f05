"""Log-probabilities of candidate answers, with a whole or a split model."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.model.interface import TextModel
from finetuning.progress import progress_bar


@dataclass
class Likelihood:
    """Log-probability of an answer after its context."""

    log_probability: float = 0.0  # sum over the answer's tokens, in nats (FL-GLM section 4.1.2)
    is_greedy: bool = True  # whether greedy decoding would generate the answer


def log_probabilities(
    model: TextModel, groups: Sequence[Sequence[Continuation]], padding: int, max_tokens: int
) -> list[list[Likelihood]]:
    """Compute the likelihood of each continuation of each group.

    A group's continuations should have a common beginning, such as the candidate answers of a
    question; the common beginning is processed once. At most ``max_tokens`` padded tokens, prefixes
    included, are processed at once. Raise a DataError if a text does not fit into ``max_tokens``.
    """
    likelihoods = [[Likelihood() for _ in group] for group in groups]
    batches = candidate_batches(groups, padding, model.columns_before, max_tokens)
    with progress_bar(total=sum(map(len, groups)), description="scoring") as bar:
        for batch in batches:
            values, _, best = model.log_probabilities(batch)
            is_best = (values >= best[:, 0]).tolist()
            for (group, candidate, token), value, is_likeliest in zip(
                batch.owners, values.tolist(), is_best, strict=True
            ):
                likelihoods[group][candidate].log_probability += value
                likelihoods[group][candidate].is_greedy &= is_likeliest
                bar.update(token == 0)
    return likelihoods
