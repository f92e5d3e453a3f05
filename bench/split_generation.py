"""Cost of splitting during generation, compared with the whole model in one process.

    python -m bench.split_generation [--pairs 5]

One process runs the client and the whole model, and one the server. Both are bound to the same
core and have one torch thread. A batch of prompts of equal length is continued by 64 tokens,
greedily and with key-value caches, in turn by the whole model and over a lane. The wire type is
float32; the run fails if tokens differ. CPU seconds are user and system time of both processes.
Ratios are a time ÷ the whole model's. ``bench.drafts`` measures lanes with delays.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from rich.table import Table

from bench.harness import RATIOS, Side, Worker, command, make_table, ratios, show, use_one_core
from bench.job import (
    LIFETIME,
    Job,
    load_body,
    load_ends,
    load_whole,
    open_model,
    random_job,
    serving,
)
from bench.shape import SEED, Shape
from finetuning.evaluation.generation import Answering
from finetuning.model.whole_model import WholeModel
from split.model.adapters import take_apart
from split.protocol.tickets import Invitation
from split.settings import SplitSettings

_ROWS, _PROMPT, _NEW = 8, 64, 64


class Server:
    """A block server in its own process, with a lane for each name."""

    def __init__(self, job: Job, split: SplitSettings, lanes: Sequence[str]) -> None:
        self._lanes, body = lanes, load_body(job, split)
        parts = take_apart(job.state(), body.partition)
        self._models = {"base": None, "global": parts["body"]}
        self._server = serving(body, job, split, len(lanes), max_cached_tokens=job.shape.tokens)

    def invite(self) -> list[Invitation]:
        """Return an invitation for each lane."""
        invite = self._server.invite_to_evaluate
        return [invite(name, 0, self._models, LIFETIME) for name in self._lanes]


def measure(models: dict[str, Answering], pids: list[int], pairs: int, vocabulary: int) -> Table:
    """Generate with all models in turn, and compare all others with the first.

    Exit if a model's tokens differ from those of the first model.
    """
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, vocabulary, (_ROWS, _PROMPT), generator=generator)
    greedily = {"do_sample": False, "min_new_tokens": _NEW, "use_cache": True, "pad_token_id": 0}
    mask, texts = torch.ones_like(tokens), dict[str, torch.Tensor]()
    first, *others = sides = [Side(name, pids, warm_up=1) for name in models]
    for _ in range(first.warm_up + pairs):
        for side in sides:
            side.start()
            texts[side.name] = models[side.name].generate(tokens, mask, _NEW, **greedily)
            side.stop()
        for side in others:
            if not torch.equal(texts[side.name], texts[first.name]):
                raise SystemExit(f"{side.name} generated other tokens than {first.name}")
    table = make_table("", "", "tokens/s", "ms per token of all rows", *RATIOS)
    for side in sides:
        median, _, _ = side.summary()
        cells = [f"{_ROWS * _NEW / median:.0f}", f"{1000 * median / _NEW:.1f}"]
        table.add_row(side.name, *cells, *ratios(side, first))
    return table


def main() -> None:
    """Measure, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="number of measured turns")
    pairs = parser.parse_args().pairs
    core = use_one_core()
    shape = Shape(rows=_ROWS, columns=_PROMPT + _NEW)
    split = SplitSettings(wire_dtype="float32")
    with random_job(shape, 1) as job, ExitStack() as stack:
        server = stack.enter_context(Worker(core, Server, job, split, ("near",)))
        (invitation,) = server.ask(Server.invite)
        model = stack.enter_context(open_model(load_ends(job, split), invitation, job, split))
        model.choose("global", {n: p.detach().clone() for n, p in model.parameters.items()})
        models: dict[str, Answering] = {"whole model": WholeModel(load_whole(job)), "split": model}
        pids = [os.getpid(), server.pid]
        table = measure(models=models, pids=pids, pairs=pairs, vocabulary=shape.vocabulary)
    show(
        f"{_ROWS} prompts of {_PROMPT} tokens, {_NEW} new tokens each; Llama with hidden size "
        f"{shape.hidden} and {shape.blocks} blocks, the first and the last at the client",
        table,
    )


if __name__ == "__main__":
    main()
