"""Measure how much of a client's text its messages reveal: ``python -m bench.attack``.

In the attack of FL-GLM section 4.3.3, a decoder is trained on a colluding client's hidden states
and texts, and then applied to another client's hidden states. Other attacks use the public model.
ROUGE-1 is in percent; tokens (or labels) read are counted over all seeds.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench.attack.measuring import Attacked, Cell, Result
from bench.attack.texts import GENERATED, Sizes, generated_texts, texts_in
from bench.harness import command, format_mean, make_table, show
from finetuning.model.base_model import load_tokenizer, locate

_ATTACKS = {
    "linear": "decoder, linear",
    "transformer": "decoder, Transformer",
    "search": "search",
}
_HEAD_BLOCKS = (0, 1, 2, 3, 6)
_NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)
_TUNED = (1, 3)  # numbers of head blocks with which a private adapter is measured
_READ = ("decoder: ROUGE-1", "decoder: tokens read", "search: tokens read")
# Carries out an attack, with settings of a `Cell`; returns a result for each seed.
_Run = Callable[..., Sequence[Result]]


def make_run(attacked: Attacked, seeds: int) -> _Run:
    """Return a function that measures an attack with each seed, as the tables need."""

    def run(attack: str, **settings: object) -> list[Result]:
        cells = (Cell(attack, seed=seed, **settings) for seed in range(seeds))  # type: ignore[arg-type]
        return [attacked.measure(cell) for cell in cells]

    return run


def by_head_blocks(runs: dict[str, _Run], heads: Sequence[int]) -> Table:
    """Return the table of attacks by number of head blocks, for all texts."""
    headings = [f"{name}: {score}" for name in runs for score in ("ROUGE-1", "tokens read")]
    table = make_table("", "head blocks", *headings)
    cells: dict[tuple[str, int], list[str]] = {}
    for head in heads:  # attacks on the same head share what is computed with it
        for attack in _ATTACKS:
            scores = (_scores(run(attack, head_blocks=head)) for run in runs.values())
            cells[attack, head] = [score for own in scores for score in own]
    for attack, label in _ATTACKS.items():
        for head in heads:
            table.add_row(label, str(head), *cells[attack, head])
    return table


def by_wire_type(run: _Run) -> Table:
    """Return the table of attacks by data type of the hidden states in transit."""
    table = make_table("", *_READ)
    for wire in ("float32", "bfloat16", "int8"):
        table.add_row(wire, *_read(run, wire=wire))
    return table


def by_noise(run: _Run) -> Table:
    """Return the table of losses and attacks by ``split.noise``."""
    table = make_table("split.noise", "loss, base model", "loss, trained", *_READ)
    for noise in (0.0, *_NOISE):
        losses = run("loss", noise=noise)
        before, after = (
            format_mean([loss[key] for loss in losses], 3) for key in ("loss_before", "loss_after")
        )
        table.add_row(f"{noise:g}", before, after, *_read(run, noise=noise))
    return table


def on_the_network(run: _Run) -> Table:
    """Return the table of what a decoder reads from what a peer on the network sees."""
    table = make_table("", "ROUGE-1", "tokens read")
    for observed in ("hidden states", "encrypted records", "random numbers"):
        table.add_row(observed, *_scores(run("transformer", observed=observed)))
    return table


def with_adapters(run: _Run, heads: Sequence[int]) -> Table:
    """Return the table of attacks on a head with an adapter that the attacker lacks."""
    table = make_table("head blocks", "", *_READ)
    for head in heads:
        for name, tuned in (("public", False), ("with adapter", True)):
            table.add_row(str(head), name, *_read(run, head_blocks=head, tuned=tuned))
    return table


def from_gradients(run: _Run) -> Table:
    """Return the table of labels that are read from gradients."""
    table = make_table("tail blocks", "", "split.noise", "labels read")
    for tail, wire, noise in (
        (1, "bfloat16", 0.0),
        (1, "bfloat16", 1.0),
        (1, "int8", 0.0),
        (2, "bfloat16", 0.0),
    ):
        results = run("gradient", tail_blocks=tail, wire=wire, noise=noise)
        table.add_row(str(tail), wire, f"{noise:g}", _count(results))
    return table


def _read(run: _Run, **settings: object) -> tuple[str, str, str]:
    """Return the Transformer's and the search's scores, as in ``_READ``."""
    return *_scores(run("transformer", **settings)), _count(run("search", **settings))


def _scores(results: Sequence[Result]) -> tuple[str, str]:
    return format_mean([100 * result["rouge1"] for result in results], 1), _count(results)


def _count(results: Sequence[Result]) -> str:
    """Return the numbers of tokens (or labels) read and attacked, over all seeds."""
    read, attacked = (sum(int(result[key]) for result in results) for key in ("read", "attacked"))
    return f"{read}/{attacked}"


def main() -> None:
    """Measure all tables, and print each as soon as it is complete."""
    parser = command(__doc__)
    parser.add_argument("--model", default="tiny", help="base model, as in model.name")
    parser.add_argument(
        "--data",
        nargs="+",
        default=[GENERATED],
        help="data sets: 'generated', or folders with BoolQ's files; all attacks are run on the "
        "first; on the others, only the decoders and the search, for each number of head blocks",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory, sizes = locate(arguments.model), Sizes()
    blocks = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    # At least one block is left for the body, and one for the tail.
    heads = [head for head in _HEAD_BLOCKS if head + 2 <= blocks]
    tokenizer = load_tokenizer(directory)
    runs: dict[str, _Run] = {}
    for data in arguments.data:
        if data == GENERATED:
            texts = generated_texts(tokenizer, sizes)
        else:
            texts = texts_in(Path(data), tokenizer, sizes)
        runs[texts.name] = make_run(Attacked(directory, texts), arguments.seeds)
        print(f"{texts.name}: a decoder can read {texts.covered():.0%} of the tokens\n")
    first = next(iter(runs.values()))
    for make in (
        partial(by_head_blocks, runs, heads),
        partial(by_wire_type, first),
        partial(by_noise, first),
        partial(on_the_network, first),
        partial(with_adapters, first, [head for head in _TUNED if head in heads]),
        partial(from_gradients, first),
    ):
        show(make())


if __name__ == "__main__":
    main()
