"""Training rows inferred from FedJudge's adapters: ``python -m bench.membership``.

A client trains the demonstration's model for a round on some rows. Like the coordinator, the
attacker has the adapter before and after the round, and decides for each candidate row whether it
was used. Score *loss*: the decrease of the row's loss. Score *gradient*: the cosine between the
adapter's change and the row's negative gradient, summed over tensors. The candidates are the rows
of the round and 64 other rows of the same client, which differ in names and wording.

The attacker also guesses the tokens of the round's rows. A gradient of a matrix A in the first
block is nearly a linear combination of the tokens' embeddings (attention adds the other tokens').
So the attacker chooses the tokens whose embeddings, whitened over the vocabulary, are nearest to
the space that the rows of these matrices' changes span, as DAGER does (arXiv 2405.15586).
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import normalize

from bench.harness import command, make_table, show
from finetuning.adapters.adapter import attach_adapter, load_state, trainable_parameters
from finetuning.data.batching import collate
from finetuning.data.rows import Row, parse_messages
from finetuning.data.tokenization import Example, tokenize
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round

_ROWS = (1, 4, 16, 64)
_OTHERS = 64
_EARLIER = 32
_BATCH = 4
_ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="gate_proj,up_proj,down_proj")
_Values = dict[str, torch.Tensor]  # adapter weights by name


def measure(
    settings: ModelSettings, seed: int, rounds: Sequence[int] = _ROWS
) -> list[dict[str, float]]:
    """Train a round on each number of rows, and attack it.

    A round's result is, by score, the probability that one of its rows has a higher score than a
    row that wasn't trained on; 0.5 equals guessing. ``tokens`` is the number of different tokens in
    the round's rows, and ``read`` how many the attacker finds with as many guesses; ``rare`` and
    ``read-rare`` count only tokens that no other row contains. Each round begins with the same
    adapter, which was trained on 32 other rows.
    """
    base = load_base_model(settings)
    torch.manual_seed(seed)
    model = WholeModel(attach_adapter(base.model, _ADAPTER, None))
    examples = _examples(base.tokenizer, max(rounds) + _OTHERS + _EARLIER, seed)
    padding = base.tokenizer.pad_token_id
    parameters = trainable_parameters(model.peft_model)
    embeddings = _first_inputs(base.model)

    def train(rows: Sequence[Example]) -> None:
        steps = [range(len(rows))[start : start + _BATCH] for start in range(0, len(rows), _BATCH)]
        train_round(
            model=model,
            parameters=parameters,
            examples=rows,
            padding=padding,
            local_round=LocalRound(steps, 0, len(steps), seed, deadline=math.inf),
            settings=TrainSettings(batch_size=_BATCH, accumulation=1, learning_rate=2e-3),
        )

    train(examples[-_EARLIER:])
    before = {name: value.detach().clone() for name, value in parameters.items()}
    others = examples[-_EARLIER - _OTHERS : -_EARLIER]
    elsewhere = _tokens([*others, *examples[-_EARLIER:]])
    found = []
    for count in rounds:
        rows = examples[:count]
        candidates = [collate([example], padding) for example in (*rows, *others)]
        load_state(parameters, before)
        losses = model.summed_losses(candidates)
        gradients = [model.gradients_of(candidate) for candidate in candidates]
        train(rows)
        changes = {name: value.detach() - before[name] for name, value in parameters.items()}
        after = model.summed_losses(candidates)
        gained = [old - new for old, new in zip(losses, after, strict=True)]
        aligned = [_alignment(gradient, changes) for gradient in gradients]
        tokens = _tokens(rows)
        read = tokens & _likely_tokens(changes, embeddings, len(tokens))
        scores = {"loss": _told(gained, count), "gradient": _told(aligned, count)}
        counts = {"tokens": tokens, "read": read}
        counts |= {"rare": tokens - elsewhere, "read-rare": read - elsewhere}
        found.append(scores | {name: len(own) for name, own in counts.items()})
    return found


def _first_inputs(model: Any) -> torch.Tensor:
    """Return the first feed-forward layer's input for each token alone, (vocabulary, hidden)."""
    first = model.get_decoder().layers[0]
    inputs: torch.Tensor = first.post_attention_layernorm(model.get_input_embeddings().weight)
    return inputs.detach().float()


def _likely_tokens(changes: _Values, inputs: torch.Tensor, count: int) -> set[int]:
    """Return the ``count`` tokens nearest to the space of the changes of the first block's A."""
    rows = torch.cat(
        [v for k, v in changes.items() if ".layers.0." in k and "lora_A" in k and "down" not in k]
    )
    covariance = torch.cov(inputs.T)
    ridge = 1e-3 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    whitening = torch.linalg.cholesky(torch.linalg.inv(covariance + ridge))
    whitened = normalize((inputs - inputs.mean(0)) @ whitening, dim=-1)
    basis = torch.linalg.qr((rows @ whitening).T).Q
    return set((whitened @ basis).norm(dim=-1).topk(count).indices.tolist())


def _tokens(examples: Sequence[Example]) -> set[int]:
    return {token for example in examples for token in example.tokens.tolist()}


def _alignment(gradient: _Values, changes: _Values) -> float:
    """Return the cosines between a row's negative gradient and the changes, summed over tensors."""
    return sum(
        float(torch.cosine_similarity(-value.flatten(), changes[name].flatten(), dim=0))
        for name, value in gradient.items()
        if value.any()
    )


def _examples(tokenizer: Any, count: int, seed: int) -> list[Example]:
    values = matters.questions(matters.divide(3, seed)[0], count, seed, "train")
    rows = [Row(parse_messages(value), f"row {n}", dict(value)) for n, value in enumerate(values)]
    # Rows cycle through the matters, so the 64 rows outside the round contain all matters.
    return tokenize(rows, tokenizer, 128)[0]


def _told(scores: Sequence[float], members: int) -> float:
    inside, outside = torch.tensor(scores[:members]), torch.tensor(scores[members:])
    return float((inside[:, None] > outside).double().mean())


def main() -> None:
    """Attack rounds with different numbers of rows, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    table = make_table("rows", "told by loss", "told by gradient", "tokens read", "in no other row")
    found = [measure(ModelSettings(name=arguments.model), seed) for seed in seeds]
    for index, rows in enumerate(_ROWS):
        cells = []
        for attack in ("loss", "gradient"):
            values = [each[index][attack] for each in found]
            cells.append(f"{100 * statistics.mean(values):.1f} % ({100 * min(values):.1f})")
        for read, of in (("read", "tokens"), ("read-rare", "rare")):
            sums = [sum(int(each[index][key]) for each in found) for key in (read, of)]
            cells.append(f"{sums[0]}/{sums[1]}")
        table.add_row(str(rows), *cells)
    show(f"{arguments.model}; mean over {arguments.seeds} seeds, and the lowest value", table)


if __name__ == "__main__":
    main()
