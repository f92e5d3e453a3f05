"""Generation over a lane with drafts, compared with one token per round trip.

    python -m bench.drafts [--pairs 5]

SmolLM2-135M-Instruct answers greedily, with ``--draft prompt``, over lanes with 0, 20 and 40 ms
each way at 1 Gbit/s. It repeats a clause of this project's licence, which is in the prompt, and
answers a question. Client, server and proxies are bound to one core, with one torch thread per
process. The wire type is float32; the run fails if drafts change an answer.
"""

from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

from bench.harness import command, compared_with, make_table, show, use_one_core
from bench.job import Job, Shape
from bench.split_generation import continued, open_lanes, take_turns
from chambers.drafts import find_draft
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.model.base_model import load_tokenizer, locate

_DELAYS = (0.0, 0.02, 0.04)
_NEW = 96
_LICENCE = Path(__file__).parent.parent.joinpath("LICENSE").read_text().split("\n\n")
_CLAUSE = next(" ".join(part.split()) for part in _LICENCE if "each Contributor hereby" in part)
_PROMPTS = {
    "a quotation": f"Repeat this clause word by word:\n\n{_CLAUSE}",
    "a free answer": "What should a court consider before it declares a contract void?",
}


def main() -> None:
    """Measure, and print the table."""
    pairs = command(__doc__, pairs=5).parse_args().pairs
    core = use_one_core()
    directory = locate("smollm2")
    tokenizer = load_tokenizer(directory)
    draft = find_draft("prompt", tokenizer).settings
    prompts = tokenize_prompts(prompt_rows([*_PROMPTS.values()]), tokenizer)
    job = Job(directory, Shape(rows=1, columns=1024), steps=1)
    table = make_table(
        *("", "ms each way", "tokens/s", "with drafts", "ratio of medians", "of minima")
    )
    with ExitStack() as stack:
        models, (own, _) = open_lanes(stack, core, job, _DELAYS)
        for model in models:
            model.choose("base", None)
        texts, lanes = zip(_PROMPTS, prompts, strict=True), zip(_DELAYS, models, strict=True)
        for (kind, tokens), (delay, model) in product(texts, lanes):
            plain = partial(continued, model, tokens[None], _NEW)
            ways = {"plain": plain, "with drafts": partial(plain, **draft)}
            sides = take_turns(ways, [own], pairs)
            rates = [f"{_NEW / side.summary()[0]:.1f}" for side in sides]
            compared = compared_with(*sides)
            ratios = [f"{compared[name]:.2f}" for name in ("medians", "minima")]
            table.add_row(kind, f"{1000 * delay:g}", *rates, *ratios)
    show(f"{_NEW} new tokens; {pairs} turns", table)


if __name__ == "__main__":
    main()
