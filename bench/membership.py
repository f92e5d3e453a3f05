"""Training rows and tokens inferred from FedJudge's adapters: ``python -m bench.membership``.

A client trains the demonstration's model for a round on some rows. Like the coordinator, the
attacker has the adapter before and after the round, and decides for each candidate row whether it
was used, by one of three scores:

- *loss*: the decrease of the row's loss.
- *gradient*: the cosine between the adapter's change and the row's negative gradient, summed over
  tensors.
- *residual* (after ProjRes, arXiv 2604.21197): how much of the row's hidden states, the inputs of
  an adapted layer, is in the space that the rows of A's change span. With plain gradients, this
  space contains all training rows' hidden states if A has enough rows.

The candidates are the rows of the round and 64 other rows of the same client, which differ in names
and wording. Rounds are repeated with different rows, from the same adapter.

`bench.tokens_told` describes the second table: how many of the rows' tokens are told.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from bench import tokens_told
from bench.harness import command, make_table, show
from bench.tokens_told import BATCH, examples_of, train_adapter
from chambers.intervals import interval
from finetuning.adapters.adapter import attach_adapter, load_state, trainable_parameters
from finetuning.data.batching import MicroBatch, collate
from finetuning.data.tokenization import Example
from finetuning.evaluation.leaks import area_under_curve, share_recognised
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel

SCORES = ("loss", "gradient", "residual")
RANKS = (4, 8, 32, 128)
ROUNDS: Mapping[int, int] = {1: 16, 4: 8, 16: 4}  # number of rounds by number of rows
_OTHERS = 64
_EARLIER = 32  # rows on which the adapter was trained before
_HIDDEN = "gate_proj.lora_A.default"  # the adapted layers whose inputs are projected
_Values = Mapping[str, torch.Tensor]  # adapter weights, or hidden states, by name


@dataclass
class Scores:
    """Scores of the rows of each round, (rows,), and of the other rows, (others,)."""

    inside: list[torch.Tensor] = field(default_factory=list)
    outside: list[torch.Tensor] = field(default_factory=list)

    def summary(self) -> str:
        """Return the AUC with its interval over rounds, and the rate of true positives."""
        pairs = zip(self.inside, self.outside, strict=True)
        of_rounds = [area_under_curve(own, other)[0] for own, other in pairs]
        auc = interval([np.array(of_rounds)], lowest=0.0, highest=1.0)
        recognised = share_recognised(torch.cat(self.inside), torch.cat(self.outside))
        text = f"{100 * auc.mean:.0f} % ({100 * auc.low:.0f} to {100 * auc.high:.0f})"
        return f"{text}, {100 * recognised:.0f} %"


def measure_membership(
    settings: ModelSettings, seed: int, rank: int, rounds: Mapping[int, int] = ROUNDS
) -> dict[int, dict[str, Scores]]:
    """Train rounds on each number of rows, and attack them; return the scores by rows and score.

    Each round begins with the same adapter, which was trained on 32 other rows.
    """
    base = load_base_model(settings)
    torch.manual_seed(seed)
    adapter = AdapterSettings(
        rank=rank, alpha=2 * rank, dropout=0.0, targets="gate_proj,up_proj,down_proj"
    )
    model = WholeModel(attach_adapter(base.model, adapter, None))
    most = max(rows * count for rows, count in rounds.items())
    examples = examples_of(base.tokenizer, most + _OTHERS + _EARLIER, seed)
    parameters = trainable_parameters(model.peft_model)

    def train_on(rows: Sequence[Example]) -> None:
        steps = [range(len(rows))[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        train_adapter(model, parameters, rows, steps, base.tokenizer, seed)

    train_on(examples[most + _OTHERS :])
    before = {name: value.detach().clone() for name, value in parameters.items()}
    candidates = [
        collate([each], base.tokenizer.pad_token_id) for each in examples[: most + _OTHERS]
    ]
    losses = torch.tensor(model.summed_losses(candidates))
    gradients = [model.gradients_of(candidate) for candidate in candidates]
    hidden = [hidden_states(model, candidate) for candidate in candidates]
    found = {rows: {score: Scores() for score in SCORES} for rows in rounds}
    for rows, count in rounds.items():
        for start in range(0, rows * count, rows):
            chosen = [*range(start, start + rows), *range(most, most + _OTHERS)]
            load_state(parameters, before)
            train_on(examples[start : start + rows])
            changes = {name: value.detach() - before[name] for name, value in parameters.items()}
            after = torch.tensor(model.summed_losses([candidates[index] for index in chosen]))
            spaces = {name: space(value) for name, value in changes.items() if _HIDDEN in name}
            values = {
                "loss": losses[chosen] - after,
                "gradient": torch.tensor([_alignment(gradients[i], changes) for i in chosen]),
                "residual": torch.tensor([-residual(hidden[i], spaces) for i in chosen]),
            }
            for score, value in values.items():
                found[rows][score].inside.append(value[:rows])
                found[rows][score].outside.append(value[rows:])
    return found


def _alignment(gradient: _Values, changes: _Values) -> float:
    """Return the cosines between a row's negative gradient and the changes, summed over tensors."""
    return sum(
        float(torch.cosine_similarity(-value.flatten(), changes[name].flatten(), dim=0))
        for name, value in gradient.items()
        if value.any()
    )


def space(change: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis, (inputs, rank), of the rows of A's change, (rank, inputs)."""
    basis: torch.Tensor = torch.linalg.qr(change.T).Q
    return basis


def residual(hidden: _Values, spaces: _Values) -> float:
    """Return the share of the hidden states' squared norm outside the spaces, over layers.

    The last token, which has no gradient, is left out.
    """
    shares = []
    for name, basis in spaces.items():
        states = hidden[name][:-1]
        inside = (states @ basis).square().sum()
        shares.append(1.0 - float(inside / states.square().sum()))
    return sum(shares) / len(shares)


def hidden_states(model: WholeModel, row: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the inputs of adapted layers, (tokens, inputs), keyed by the name of A."""
    states: dict[str, torch.Tensor] = {}
    with _watching(model, states):
        model.summed_losses([row])
    return states


@contextmanager
def _watching(model: WholeModel, states: dict[str, torch.Tensor]) -> Iterator[None]:
    layers = [each for each in model.peft_model.named_modules() if each[0].endswith(_HIDDEN)]
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: states.update({f"{name}.weight": inputs[0][0]})
        )
        for name, layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    """Attack rounds with different ranks and numbers of rows, and kinds of adapters."""
    parser = command(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the second table")
    arguments = parser.parse_args()
    settings = ModelSettings(name=arguments.model)
    table = make_table("rank", "rows", *(f"told by {score}" for score in SCORES))
    for rank in RANKS:
        for rows, scores in measure_membership(settings, 0, rank).items():
            cells = [scores[score].summary() for score in SCORES]
            table.add_row(str(rank), str(rows), *cells)
    show(
        f"{arguments.model}; AUC with its 95 % interval, and rows told at 1 % false positives",
        table,
    )
    table = tokens_told.make_token_table(
        [tokens_told.measure_tokens(settings, seed) for seed in range(arguments.seeds)]
    )
    show(f"{arguments.model}; sums over {arguments.seeds} seeds", table)


if __name__ == "__main__":
    main()
