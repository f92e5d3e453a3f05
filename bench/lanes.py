"""Generation over eight lanes at once, compared with one lane after another.

    python -m bench.lanes [--pairs 5]

SmolLM2-135M-Instruct with random adapters answers a question over each lane, greedily. The clients
are threads of one process, and the server has its own; both are bound to the same core and have one
torch thread. The wire type is float32; the run fails if answers differ. With ``--device cuda``, all
use the first GPU, and the processes are not bound to a core.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from bench.harness import RATIOS, Side, Worker, command, make_table, ratios, show, use_one_core
from bench.job import Job, load_ends, open_model, random_examples
from bench.shape import Shape
from bench.split_generation import Server
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.generation import GREEDY
from finetuning.model.base_model import load_tokenizer, locate
from split.settings import SplitSettings

_LANES, _NEW = 8, 48


def main() -> None:
    """Measure, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="number of measured turns")
    parser.add_argument("--device", default="cpu", help="device of the clients and the server")
    arguments = parser.parse_args()
    pairs, device = arguments.pairs, arguments.device
    cores = use_one_core() if device == "cpu" else os.sched_getaffinity(0)
    directory = locate("smollm2")
    questions = [f"May a tenant who owes {number} rents use the flat?" for number in range(_LANES)]
    prompts = tokenize_prompts(prompt_rows(questions), load_tokenizer(directory))
    job = Job(
        directory=directory,
        shape=Shape(rows=1, columns=1024),
        steps=1,
        examples=random_examples,
        client_device=device,
        server_device=device,
    )
    split = SplitSettings(wire_dtype="float32")
    settings: dict[str, Any] = {"pad_token_id": 0, "min_new_tokens": _NEW, **GREEDY}
    with ExitStack() as stack:
        server = stack.enter_context(Worker(cores, Server, job, split, [*map(str, range(_LANES))]))
        lanes = []
        for invitation, tokens in zip(server.ask(Server.invite), prompts, strict=True):
            model = stack.enter_context(open_model(load_ends(job, split), invitation, job, split))
            model.choose("global", {n: p.detach().clone() for n, p in model.parameters.items()})
            lanes.append((model, tokens[None]))

        def answer(lane: Any) -> Any:
            model, tokens = lane
            return model.generate(tokens, torch.ones_like(tokens), _NEW, **settings)

        pool = stack.enter_context(ThreadPoolExecutor(_LANES))
        in_turn, at_once = (Side(n, [os.getpid(), server.pid], 1) for n in ("in turn", "at once"))
        for _ in range(1 + pairs):
            in_turn.start()
            expected = [*map(answer, lanes)]
            in_turn.stop()
            at_once.start()
            found = [*pool.map(answer, lanes)]
            at_once.stop()
            if not all(map(torch.equal, found, expected)):
                raise SystemExit("an answer depends on the other lanes")
    table = make_table(f"{_LANES} lanes, {_NEW} new tokens; {pairs} turns", "", "tokens/s", *RATIOS)
    for side in (in_turn, at_once):
        rate = _LANES * _NEW / side.summary()[0]
        table.add_row(side.name, f"{rate:.1f}", *ratios(in_turn, side))
    show(table)


if __name__ == "__main__":
    main()
