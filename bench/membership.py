"""Training rows and tokens inferred from FedJudge's adapters: ``python -m bench.membership``.

A client trains the demonstration's model for a round on some rows. Like the coordinator, the
attacker has the adapter before and after the round, and decides for each candidate row whether it
was used. Score *loss*: the decrease of the row's loss. Score *gradient*: the cosine between the
adapter's change and the row's negative gradient, summed over tensors. The candidates are the rows
of the round and 64 other rows of the same client, which differ in names and wording.

`bench.tokens_told` describes the second table: how many of the rows' tokens are told.
"""

import statistics
from collections.abc import Sequence

import torch

from bench import tokens_told
from bench.harness import command, make_table, show
from bench.tokens_told import BATCH, examples_of, train_adapter
from finetuning.adapters.adapter import attach_adapter, load_state, trainable_parameters
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel

_ROWS = (1, 4, 16, 64)
_OTHERS = 64
_EARLIER = 32
_ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="gate_proj,up_proj,down_proj")
_Values = dict[str, torch.Tensor]  # adapter weights by name


def measure_membership(
    settings: ModelSettings, seed: int, rounds: Sequence[int] = _ROWS
) -> list[dict[str, float]]:
    """Train a round on each number of rows, and attack it.

    A round's result is, by score, the probability that one of its rows has a higher score than a
    row that wasn't trained on; 0.5 equals guessing. Each round begins with the same adapter, which
    was trained on 32 other rows.
    """
    base = load_base_model(settings)
    torch.manual_seed(seed)
    model = WholeModel(attach_adapter(base.model, _ADAPTER, None))
    examples = examples_of(base.tokenizer, max(rounds) + _OTHERS + _EARLIER, seed)
    parameters = trainable_parameters(model.peft_model)

    def train_on(rows: Sequence[Example]) -> None:
        steps = [range(len(rows))[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        train_adapter(model, parameters, rows, steps, base.tokenizer, seed)

    train_on(examples[-_EARLIER:])
    before = {name: value.detach().clone() for name, value in parameters.items()}
    others = examples[-_EARLIER - _OTHERS : -_EARLIER]
    results = []
    for count in rounds:
        rows = examples[:count]
        candidates = [collate([e], base.tokenizer.pad_token_id) for e in (*rows, *others)]
        load_state(parameters, before)
        losses = model.summed_losses(candidates)
        gradients = [model.gradients_of(candidate) for candidate in candidates]
        train_on(rows)
        changes = {name: value.detach() - before[name] for name, value in parameters.items()}
        after = model.summed_losses(candidates)
        gained = [old - new for old, new in zip(losses, after, strict=True)]
        aligned = [_alignment(gradient, changes) for gradient in gradients]
        results.append(
            {
                "loss": _share_recognised(gained, count),
                "gradient": _share_recognised(aligned, count),
            }
        )
    return results


def _alignment(gradient: _Values, changes: _Values) -> float:
    """Return the cosines between a row's negative gradient and the changes, summed over tensors."""
    return sum(
        float(torch.cosine_similarity(-value.flatten(), changes[name].flatten(), dim=0))
        for name, value in gradient.items()
        if value.any()
    )


def _share_recognised(scores: Sequence[float], members: int) -> float:
    inside, outside = torch.tensor(scores[:members]), torch.tensor(scores[members:])
    return float((inside[:, None] > outside).double().mean())


def main() -> None:
    """Attack rounds with different numbers of rows, and kinds of adapters; print both tables."""
    parser = command(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    settings, seeds = ModelSettings(name=arguments.model), range(arguments.seeds)
    table = make_table("rows", "told by loss", "told by gradient")
    results = [measure_membership(settings, seed) for seed in seeds]
    for index, rows in enumerate(_ROWS):
        cells = []
        for attack in ("loss", "gradient"):
            values = [each[index][attack] for each in results]
            cells.append(f"{100 * statistics.mean(values):.1f} % ({100 * min(values):.1f})")
        table.add_row(str(rows), *cells)
    show(f"{arguments.model}; mean over {arguments.seeds} seeds, and the lowest value", table)
    table = tokens_told.make_token_table(
        [tokens_told.measure_tokens(settings, seed) for seed in seeds]
    )
    show(f"{arguments.model}; sums over {arguments.seeds} seeds", table)


if __name__ == "__main__":
    main()
