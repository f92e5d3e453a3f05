"""Generation over eight lanes at once, compared with one lane after another.

    python -m bench.lanes [--pairs 5]

SmolLM2-135M-Instruct with random adapters answers a question over each lane, greedily. The clients
are threads of one process, and the server has its own; both are bound to the same core and have one
torch thread. The wire type is float32; the run fails if answers differ.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from bench.harness import RATIOS, command, make_table, ratios, show, use_one_core
from bench.job import Job, Shape
from bench.split_generation import continued, open_lanes, take_turns
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.model.base_model import load_tokenizer, locate

_LANES, _NEW = 8, 48


def main() -> None:
    """Measure, and print the table."""
    pairs = command(__doc__, pairs=5).parse_args().pairs
    core = use_one_core()
    directory = locate("smollm2")
    questions = [f"May a tenant who owes {number} rents use the flat?" for number in range(_LANES)]
    prompts = tokenize_prompts(prompt_rows(questions), load_tokenizer(directory))
    job = Job(directory, Shape(rows=1, columns=1024), steps=1)
    with ExitStack() as stack:
        models, pids = open_lanes(stack, core, job, [0.0] * _LANES)
        for model in models:
            model.choose("global", model.parameters)
        pool = stack.enter_context(ThreadPoolExecutor(_LANES))
        answer, rows = partial(continued, new=_NEW), [tokens[None] for tokens in prompts]
        ways = {
            "in turn": lambda: [*map(answer, models, rows)],
            "at once": lambda: [*pool.map(answer, models, rows)],
        }
        sides = take_turns(ways, pids, pairs)
    table = make_table("", "tokens/s", *RATIOS)
    for side in sides:
        rate = _LANES * _NEW / side.summary()[0]
        table.add_row(side.name, f"{rate:.1f}", *ratios(sides[0], side))
    show(f"{_LANES} lanes, {_NEW} new tokens; {pairs} turns", table)


if __name__ == "__main__":
    main()
