"""Membership inference from FedJudge's adapters: ``python -m bench.membership``.

A client trains the demonstration's model for a round on some rows. Like the coordinator, the
attacker has the adapter before and after the round, and decides for each candidate row whether it
was used. The score *loss* is the decrease of the row's loss; *gradient* is the cosine between the
adapter's change and the row's negative gradient, summed over tensors. The candidates are the rows
of the round and 64 other rows of the same client, which differ in names and wording.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

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
_BATCH = 4
_ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="gate_proj,up_proj,down_proj")


def measure(
    settings: ModelSettings, seed: int, rounds: Sequence[int] = _ROWS
) -> list[dict[str, float]]:
    """Train a round on each number of rows; return how well each attack tells its rows from others.

    A round's result is, by attack, the probability that one of its rows has a higher score than a
    row that wasn't trained on; 0.5 equals guessing. Each round begins with the same adapter.
    """
    base = load_base_model(settings)
    torch.manual_seed(seed)
    model = WholeModel(attach_adapter(base.model, _ADAPTER, None))
    examples = _examples(base.tokenizer, max(rounds) + _OTHERS, seed)
    padding = base.tokenizer.pad_token_id
    parameters = trainable_parameters(model.peft_model)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    losses = _losses(model, examples, padding)
    gradients = [model.gradients_of(collate([example], padding)) for example in examples]
    found = []
    for rows in rounds:
        load_state(parameters, before)
        numbers = range(rows)
        steps = [numbers[start : start + _BATCH] for start in numbers[::_BATCH]]
        train_round(
            model=model,
            parameters=parameters,
            examples=examples[:rows],
            padding=padding,
            local_round=LocalRound(steps, 0, len(steps), seed, deadline=math.inf),
            settings=TrainSettings(batch_size=_BATCH, accumulation=1, learning_rate=2e-3),
        )
        changes = {name: value.detach() - before[name] for name, value in parameters.items()}
        chosen = [*numbers, *range(len(examples) - _OTHERS, len(examples))]
        after = _losses(model, [examples[i] for i in chosen], padding)
        gained = [losses[i] - loss for i, loss in zip(chosen, after, strict=True)]
        aligned = [_alignment(gradients[i], changes) for i in chosen]
        found.append({"loss": _told(gained, rows), "gradient": _told(aligned, rows)})
    return found


def _alignment(gradient: dict[str, torch.Tensor], changes: dict[str, torch.Tensor]) -> float:
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


def _losses(model: WholeModel, examples: Sequence[Example], padding: int) -> list[float]:
    return [model.summed_losses([collate([example], padding)])[0] for example in examples]


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
    table = make_table(
        f"{arguments.model}, one round; mean over {arguments.seeds} seeds, and the lowest value",
        *("rows", "told by loss", "told by gradient"),
    )
    found = [measure(ModelSettings(name=arguments.model), seed) for seed in seeds]
    for index, rows in enumerate(_ROWS):
        cells = []
        for attack in ("loss", "gradient"):
            values = [each[index][attack] for each in found]
            cells.append(f"{100 * statistics.mean(values):.1f} % ({100 * min(values):.1f})")
        table.add_row(str(rows), *cells)
    show(table)


if __name__ == "__main__":
    main()
