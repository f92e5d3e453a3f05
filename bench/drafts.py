"""Generation over a lane with drafts, compared with one token per round trip.

    python -m bench.drafts [--pairs 5]

SmolLM2-135M-Instruct answers greedily, with ``--draft prompt``, over lanes with 0, 20 and 40 ms
each way at 1 Gbit/s. It repeats a clause of this project's licence, which is in the prompt, and
answers a question. Client, server and proxies are bound to one core, with one torch thread per
process. The wire type is float32; the run fails if drafts change an answer.
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness import Side, Worker, command, make_table, show, use_one_core
from bench.job import Job, load_ends, open_model, random_examples
from bench.proxy import Proxy
from bench.shape import Shape
from bench.split_generation import Server
from chambers.drafts import find_draft
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.generation import GREEDY
from finetuning.model.base_model import load_tokenizer, locate
from split.settings import SplitSettings

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
    parser = command(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="number of measured turns")
    pairs = parser.parse_args().pairs
    core = use_one_core()
    directory = locate("smollm2")
    tokenizer = load_tokenizer(directory)
    draft = dict(find_draft("prompt", tokenizer).settings)
    job = Job(directory, Shape(rows=1, columns=1024), 1, random_examples)
    split = SplitSettings(wire_dtype="float32")
    settings: dict[str, Any] = {"pad_token_id": 0, "min_new_tokens": _NEW, **GREEDY}
    table = make_table(
        f"{_NEW} new tokens; {pairs} turns",
        *("", "ms each way", "tokens/s", "with drafts", "ratio of medians", "of minima"),
    )
    with ExitStack() as stack:
        server = stack.enter_context(Worker(core, Server, job, split, [*map(str, _DELAYS)]))
        models = {}
        for delay, invitation in zip(_DELAYS, server.ask(Server.invite), strict=True):
            if delay:
                proxy = Worker(core, Proxy, invitation.address, delay, 1.0)
                address = stack.enter_context(proxy).ask(Proxy.address)
                invitation = replace(invitation, address=address)  # noqa: PLW2901
            ends = load_ends(job, split)
            models[delay] = stack.enter_context(open_model(ends, invitation, job, split))
            models[delay].choose("base", None)
        for (kind, prompt), delay in product(_PROMPTS.items(), _DELAYS):
            (tokens,) = tokenize_prompts(prompt_rows([prompt]), tokenizer)
            given = (tokens[None], torch.ones_like(tokens)[None], _NEW)
            sides = [Side(name, [os.getpid()], warm_up=1) for name in ("plain", "drafted")]
            for _ in range(1 + pairs):
                texts = []
                for side, chosen in zip(sides, (settings, settings | draft), strict=True):
                    side.start()
                    texts.append(models[delay].generate(*given, **chosen))
                    side.stop()
                if not torch.equal(*texts):
                    raise SystemExit("drafts changed an answer")
            seconds = [side.seconds[1:] for side in sides]
            rates = [f"{_NEW / median(each):.1f}" for each in seconds]
            ratios = [f"{f(seconds[0]) / f(seconds[1]):.2f}" for f in (median, min)]
            table.add_row(kind, f"{1000 * delay:g}", *rates, *ratios)
    show(table)


if __name__ == "__main__":
    main()
