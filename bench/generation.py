"""Generation with a split model: ``python -m bench.generation [--pairs 5]``.

One process runs the clients and the whole model, and one the server. They and the proxies of slower
lanes share one core, and have one torch thread. Texts are generated greedily, in ways that take
turns, with hidden states in float32; the run fails if the ways generate different tokens. CPU
seconds are user and system time of client and server.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.harness import (
    RATIOS,
    BoundProcess,
    Side,
    command,
    compared_with,
    make_table,
    ratios,
    show,
    use_one_core,
)
from bench.job import (
    FLOAT32,
    SEED,
    Shape,
    TrainingJob,
    load_client_parts,
    load_whole,
    open_model,
    random_job,
)
from bench.parties import BenchServer
from bench.proxy import Proxy
from chambers.model_source import ModelSource
from chambers.models import MAX_DRAFTED, find_draft
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.batching import collate
from finetuning.data.layouts import Row, parse_row
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.data.tokenization import Example, tokenize
from finetuning.evaluation.generation import GREEDY
from finetuning.generated.clients import generate_client
from finetuning.model.base_model import load_base_model
from finetuning.model.drafts import RowDrafts
from finetuning.model.interface import TextModel
from finetuning.model.locating import locate
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import AdapterSettings
from finetuning.whole_model import WholeModel
from split.client.split_model import SplitModel
from split.settings import SplitSettings

_ROWS, _PROMPT, _NEW = 8, 64, 64  # of the batch that the whole model continues, too
_DELAYS, _NEW_WITH_DRAFTS = (0.0, 0.02, 0.04), 96
_LANES, _NEW_OVER_LANES = 8, 96
_CLIENTS, _STEPS = 3, 40
_ADAPTER = AdapterSettings(rank=8, alpha=16, dropout=0.0, targets="gate_proj,up_proj,down_proj")
_LICENCE = Path(__file__).parent.parent.joinpath("LICENSE").read_text().split("\n\n")
_CLAUSE = next(" ".join(part.split()) for part in _LICENCE if "each Contributor hereby" in part)
_PROMPTS = {
    "a quotation": f"Repeat this clause word by word:\n\n{_CLAUSE}",
    "a free answer": "What should a court consider before it declares a contract void?",
}


def open_lanes(
    stack: ExitStack, cores: Collection[int], job: TrainingJob, delays: Sequence[float]
) -> tuple[list[SplitModel], list[int]]:
    """Open a lane with each delay, in seconds each way, to a block server in its own process.

    A lane with a delay has a rate of 1 Gbit/s. Return a model for each lane, and the ids of this
    process and the server's.
    """
    # A lane may be idle while another is measured.
    split = SplitSettings(wire_dtype="float32", frame_timeout=3600.0)
    server = stack.enter_context(BoundProcess(cores, BenchServer, [job] * len(delays), split))
    models = []
    for delay, invitation in zip(delays, server.ask(BenchServer.invite_to_evaluate), strict=True):
        address = invitation.address
        if delay:
            proxy = stack.enter_context(BoundProcess(cores, Proxy, address, delay, 1.0))
            address = proxy.ask(Proxy.address)
        lane = open_model(
            load_client_parts(job, split), replace(invitation, address=address), job, split
        )
        models.append(stack.enter_context(lane))
    return models, [os.getpid(), server.pid]


def continue_prompts(
    model: TextModel, tokens: torch.Tensor, new: int, **settings: Any
) -> torch.Tensor:
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


def compare_with_whole(core: Collection[int], pairs: int) -> None:
    """Measure the whole model and a split model, and print the table."""
    shape = Shape(rows=_ROWS, columns=_PROMPT + _NEW)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, shape.vocabulary, (_ROWS, _PROMPT), generator=generator)
    with random_job(shape, 1) as job, ExitStack() as stack:
        (model,), pids = open_lanes(stack, core, job, delays=[0.0])
        model.choose("global", model.parameters)
        ways = {
            "whole model": partial(continue_prompts, WholeModel(load_whole(job)), tokens, _NEW),
            "split": partial(continue_prompts, model, tokens, _NEW),
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


def compare_drafts(core: Collection[int], pairs: int) -> None:
    """Measure a clause repeated from the prompt, and a free answer, with and without drafts."""
    job, tokenizer = smollm2()
    draft = find_draft("prompt", tokenizer, [ModelSource(FLOAT32, job.directory)]).settings
    prompts = tokenize_prompts(prompt_rows([*_PROMPTS.values()]), tokenizer)
    table = make_table(
        *("", "ms each way", "tokens/s", "with drafts", "ratio of medians", "of minima")
    )
    with ExitStack() as stack:
        models, pids = open_lanes(stack, core, job, _DELAYS)
        for model in models:
            model.choose("base", None)
        texts, lanes = zip(_PROMPTS, prompts, strict=True), zip(_DELAYS, models, strict=True)
        for (kind, tokens), (delay, model) in product(texts, lanes):
            plain = partial(continue_prompts, model, tokens[None], _NEW_WITH_DRAFTS)
            sides = take_turns({"plain": plain, "drafts": partial(plain, **draft)}, pids, pairs)
            table.add_row(kind, f"{1000 * delay:g}", *compare_rates(sides, _NEW_WITH_DRAFTS))
    show(f"{_NEW_WITH_DRAFTS} new tokens; {pairs} turns", table)


def compare_row_drafts(core: Collection[int], pairs: int) -> None:
    """Measure answers of a fine-tuned model, with and without drafts from one client's rows.

    A third of the questions are on matters of the client's rows, and the others on other clients'.
    """
    tokenizer = load_tokenizer(locate("smollm2"))
    clients = [generate_client("matters", index, _CLIENTS, SEED) for index in range(_CLIENTS)]
    rows = [tokenize(_parse(client.train), tokenizer)[0] for client in clients]
    prompts = tokenize_prompts(_parse(clients[0].test), tokenizer)
    others = len(prompts) - len(prompts) // _CLIENTS
    kinds = {"own matters": prompts[others:], "others' matters": prompts[:others]}
    table = make_table(
        *("", "ms each way", "tokens/s", "with drafts", "ratio of medians", "of minima")
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        fine_tune([each for own in rows for each in own], directory)
        job = TrainingJob(directory, Shape(rows=1, columns=1024), steps=1)
        models, pids = open_lanes(stack, core, job, _DELAYS)
        for delay, model in zip(_DELAYS, models, strict=True):
            model.choose("base", None)
            drafts = {
                "prompt_lookup_num_tokens": MAX_DRAFTED,
                "row_drafts": RowDrafts(rows[0]),
            }
            for kind, chosen in kinds.items():
                plain = partial(answer, model, chosen)
                new = sum(map(len, plain())) - sum(map(len, chosen))
                ways = {"plain": plain, "drafts": partial(plain, **drafts)}
                rates = compare_rates(take_turns(ways, pids, pairs), new)
                table.add_row(kind, f"{1000 * delay:g}", *rates)
    show(f"{len(prompts)} answers, with drafts from a third of the rows; {pairs} turns", table)


def answer(
    model: TextModel, prompts: Sequence[torch.Tensor], **settings: Any
) -> list[torch.Tensor]:
    """Continue each prompt, (tokens,), greedily until it ends; return the texts, (tokens,)."""
    settings |= {"pad_token_id": 0, **GREEDY}
    rows = [prompt[None] for prompt in prompts]
    return [
        model.generate(row, torch.ones_like(row), _NEW_WITH_DRAFTS, **settings)[0] for row in rows
    ]


def compare_rates(sides: Sequence[Side], new_tokens: int) -> list[str]:
    """Return each side's tokens per second, and the ratios of medians and of minima."""
    compared = compared_with(*sides)
    rates = [f"{new_tokens / side.summary()[0]:.1f}" for side in sides]
    return rates + [f"{compared[name]:.2f}" for name in ("medians", "minima")]


def _parse(values: Sequence[Any]) -> list[Row]:
    return [parse_row(f"row {number}", value) for number, value in enumerate(values)]


def fine_tune(rows: Sequence[Example], directory: Path) -> None:
    """Train SmolLM2-135M-Instruct on some rows, and save the merged model."""
    base = load_base_model(FLOAT32.model_copy(update={"name": "smollm2"}))
    model = WholeModel(attach_adapter(base.model, _ADAPTER, base.reference))
    weights = [*trainable_parameters(model.peft_model).values()]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))
    for step, chosen in enumerate(torch.split(order, _ROWS)[:_STEPS]):
        model.accumulate([collate([rows[row] for row in chosen], padding=0)], step)
        model.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.peft_model.merge_and_unload().save_pretrained(directory)
    load_tokenizer(base.directory).save_pretrained(directory)


def compare_lanes(core: Collection[int], pairs: int) -> None:
    """Measure generation over several lanes in turn and at once, and print the table.

    CPU seconds are those of the server, because real clients compute at the same time.
    """
    job, tokenizer = smollm2()
    questions = [f"May a tenant who owes {number} rents use the flat?" for number in range(_LANES)]
    rows = [tokens[None] for tokens in tokenize_prompts(prompt_rows(questions), tokenizer)]
    answer = partial(continue_prompts, new=_NEW_OVER_LANES)
    with ExitStack() as stack:
        models, (_, server) = open_lanes(stack, core, job, [0.0] * _LANES)
        for model in models:
            model.choose("global", model.parameters)
        pool = stack.enter_context(ThreadPoolExecutor(_LANES))
        ways = {
            "in turn": lambda: [*map(answer, models, rows)],
            "at once": lambda: [*pool.map(answer, models, rows)],
        }
        sides = take_turns(ways, [server], pairs)
    table = make_table("", "tokens/s", *RATIOS)
    for side in sides:
        rate = _LANES * _NEW_OVER_LANES / side.summary()[0]
        table.add_row(side.name, f"{rate:.1f}", *ratios(sides[0], side))
    show(f"{_LANES} lanes, {_NEW_OVER_LANES} new tokens; {pairs} turns", table)


def smollm2() -> tuple[TrainingJob, Any]:
    """Return a job with SmolLM2-135M-Instruct, and its tokenizer."""
    directory = locate("smollm2")
    return TrainingJob(directory, Shape(rows=1, columns=1024), steps=1), load_tokenizer(directory)


def main() -> None:
    """Measure, and print the tables."""
    pairs = command(__doc__, pairs=5).parse_args().pairs
    core = use_one_core()
    for compare in (compare_with_whole, compare_drafts, compare_row_drafts, compare_lanes):
        compare(core, pairs)


if __name__ == "__main__":
    main()
