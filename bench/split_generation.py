"""Cost of splitting during generation, compared with the whole model in one process.

    python -m bench.split_generation [--pairs 5]

One process runs the client and the whole model, and one the server. Both are bound to the same
core and have one torch thread. A batch of prompts of equal length is continued by 64 tokens,
greedily and with key-value caches, in turn by the whole model and over a lane. The wire type is
float32; the run fails if tokens differ. CPU seconds are user and system time of both processes.
Ratios are a time ÷ the whole model's. ``bench.drafts`` measures lanes with delays.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.harness import RATIOS, Side, Worker, command, make_table, ratios, show, use_one_core
from bench.job import (
    LIFETIME,
    SEED,
    Job,
    Shape,
    load_body,
    load_ends,
    load_whole,
    open_model,
    random_job,
    serving,
)
from bench.proxy import Proxy
from finetuning.evaluation.generation import GREEDY, Answering
from finetuning.model.whole_model import WholeModel
from split.client.split_model import SplitModel
from split.model.adapters import take_apart
from split.protocol.tickets import Invitation
from split.settings import SplitSettings

_ROWS, _PROMPT, _NEW = 8, 64, 64


class Server:
    """A block server in its own process, with numbered lanes."""

    def __init__(self, job: Job, split: SplitSettings, lanes: int) -> None:
        body = load_body(job, split)
        parts = take_apart(job.state(), body.partition)
        self._models = {"base": None, "global": parts["body"]}
        self._server = serving(body, job, split, lanes, max_cached_tokens=job.shape.tokens)
        self._lanes = lanes

    def invite(self) -> list[Invitation]:
        """Return an invitation for each lane."""
        invite = self._server.invite_to_evaluate
        return [invite(str(lane), 0, self._models, LIFETIME) for lane in range(self._lanes)]


def open_lanes(
    stack: ExitStack, cores: Collection[int], job: Job, delays: Sequence[float]
) -> tuple[list[SplitModel], list[int]]:
    """Open a lane with each delay, in seconds each way, to a block server in its own process.

    A lane with a delay has a rate of 1 Gbit/s. The server has the models ``base`` and ``global``,
    with the initial adapter. Return a model for each lane, and the ids of this process and the
    server's.
    """
    split = SplitSettings(wire_dtype="float32")
    server = stack.enter_context(Worker(cores, Server, job, split, len(delays)))
    models = []
    for delay, invitation in zip(delays, server.ask(Server.invite), strict=True):
        address = invitation.address
        if delay:
            proxy = stack.enter_context(Worker(cores, Proxy, address, delay, 1.0))
            address = proxy.ask(Proxy.address)
        lane = open_model(load_ends(job, split), replace(invitation, address=address), job, split)
        models.append(stack.enter_context(lane))
    return models, [os.getpid(), server.pid]


def continued(model: Answering, tokens: torch.Tensor, new: int, **settings: Any) -> torch.Tensor:
    """Continue prompts of equal length, (rows, tokens), greedily by ``new`` tokens."""
    settings |= {"min_new_tokens": new, "use_cache": True, "pad_token_id": 0, **GREEDY}
    return model.generate(tokens, torch.ones_like(tokens), new, **settings)


def take_turns(
    ways: Mapping[str, Callable[[], Any]], pids: Sequence[int], pairs: int
) -> list[Side]:
    """Generate in all ways in turn; exit if the tokens differ from those of the first way."""
    first, *others = sides = [Side(name, pids, warm_up=1) for name in ways]
    for _ in range(first.warm_up + pairs):
        texts = {}
        for side in sides:
            side.start()
            texts[side.name] = ways[side.name]()
            side.stop()
        for side in others:
            if not all(map(torch.equal, texts[side.name], texts[first.name])):
                raise SystemExit(f"{side.name} generated other tokens than {first.name}")
    return sides


def main() -> None:
    """Measure, and print the table."""
    pairs = command(__doc__, pairs=5).parse_args().pairs
    core = use_one_core()
    shape = Shape(rows=_ROWS, columns=_PROMPT + _NEW)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, shape.vocabulary, (_ROWS, _PROMPT), generator=generator)
    with random_job(shape, 1) as job, ExitStack() as stack:
        (model,), pids = open_lanes(stack, core, job, delays=[0.0])
        model.choose("global", model.parameters)
        ways = {
            "whole model": partial(continued, WholeModel(load_whole(job)), tokens, _NEW),
            "split": partial(continued, model, tokens, _NEW),
        }
        sides = take_turns(ways, pids, pairs)
    table = make_table("", "tokens/s", "ms per token of all rows", *RATIOS)
    for side in sides:
        median, _, _ = side.summary()
        cells = [f"{_ROWS * _NEW / median:.0f}", f"{1000 * median / _NEW:.1f}"]
        table.add_row(side.name, *cells, *ratios(side, sides[0]))
    show(
        f"{_ROWS} prompts of {_PROMPT} tokens, {_NEW} new tokens each; Llama with hidden size "
        f"{shape.hidden} and {shape.blocks} blocks, the first and the last at the client",
        table,
    )


if __name__ == "__main__":
    main()
