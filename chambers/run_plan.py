"""``chambers train --plan``: what a run will take, estimated without training."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chambers.actors import (
    Machine,
    count_actors,
    describe_memory,
    find_base_checkpoint,
    this_machine,
)
from client_app.data import ClientData
from federation.run_config import RunConfig
from finetuning.adapters.adapted_modules import with_names
from finetuning.adapters.adapter import initial_adapter
from finetuning.data.batching import steps_per_round
from finetuning.data.tokenization import Example, tokenize
from finetuning.devices import default_device, default_dtype
from finetuning.model.checkpoint import client_parameters, hidden_size
from finetuning.model.locating import locate_description
from finetuning.model.tokenizer import load_tokenizer

# Share of a matrix product's speed that training and evaluation reach, which is smaller below a
# hidden size of 320, and seconds that Flower and Ray take to start, and for each message. Measured
# with ``tiny``, SmolLM2 and 1 billion random weights on two cores.
_EFFICIENCY, _WIDE = 0.5, 320
_START = 25.0
_MESSAGE = 0.5
_READING = 6e9  # bytes per second at which weights are read for each generated token


TokenizedClients = Sequence[
    tuple[list[Example], list[Example]]
]  # training and held-out rows of clients


def describe_run(config: RunConfig, clients: int, data: Sequence[ClientData]) -> list[str]:
    """Return lines with the memory, the clients' tokens, the time, and what leaves a client.

    ``data`` has the rows of the first clients. Raise ``CommandError`` if this machine can't
    simulate the run.
    """
    machine = this_machine()
    actors = count_actors(config, config.sampled(clients), machine)
    lines = []
    if checkpoint := find_base_checkpoint(config):
        lines.append(describe_memory(config, checkpoint, actors, machine))
    base = locate_description(config.model.name)
    parts, shortened = _tokenize(config, base, data)
    lines += [
        f"{client.name}: {len(train)} training rows with {_tokens(train)} tokens "
        f"({cut} rows shortened); {len(test)} held-out rows with {_tokens(test)} tokens"
        for client, (train, test), cut in zip(data, parts, shortened, strict=True)
    ]
    lines.append(_time(config, clients, base, parts, machine))
    if config.method.is_split:
        return [*lines, _hidden_states(config, base, [train for train, _ in parts])]
    return [*lines, *_adapters(config, clients, base)]


def describe_time(config: RunConfig, clients: int, data: Sequence[ClientData]) -> str:
    """Return a line with the time that a run will take, and the rows' length, which explains it.

    ``data`` has the rows of the first clients. Raise ``CommandError`` if this machine can't
    simulate the run.
    """
    base = locate_description(config.model.name)
    parts, _ = _tokenize(config, base, data)
    rows = [example for train, _ in parts for example in train]
    line = _time(config, clients, base, parts, this_machine())
    return f"{line}; training rows have {_tokens(rows) / len(rows):.0f} tokens on average"


def _tokenize(
    config: RunConfig, base: Path, data: Sequence[ClientData]
) -> tuple[TokenizedClients, list[int]]:
    """Return the clients' tokenized rows, and how many training rows of each are shortened."""
    tokenizer = load_tokenizer(base)
    parts, shortened = [], []
    for client in data:
        train, report = tokenize(client.train, tokenizer, config.data.max_length)
        parts.append((train, tokenize(client.test, tokenizer, config.data.max_length)[0]))
        shortened.append(len(report.cut_rows))
    return parts, shortened


def _time(
    config: RunConfig, clients: int, base: Path, parts: TokenizedClients, machine: Machine
) -> str:
    actors = count_actors(config, config.sampled(clients), machine)
    at_once = max(machine.gpus, min(actors, machine.cores)) * len(parts) / clients
    training, evaluation = _seconds(config, base, parts, at_once)
    other = _START + _MESSAGE * clients * (config.rounds + _evaluations(config))
    return (
        f"time: about {_duration(training)} for training, {_duration(evaluation)} for evaluation, "
        f"{_duration(other)} for starting and messages"
    )


def _evaluations(config: RunConfig) -> int:
    return math.ceil(config.rounds / config.evaluate.every)


def _seconds(
    config: RunConfig,
    base: Path,
    parts: TokenizedClients,
    at_once: float,
) -> tuple[float, float]:
    """Estimate the seconds of training and evaluation, shared by ``at_once`` processes."""
    ends = client_parameters(base, 0)
    blocks = client_parameters(base) - ends
    evaluations, evaluate = _evaluations(config), config.evaluate
    models = 1 + evaluations * (2 + evaluate.alone)
    trained = evaluated = generated = 0.0
    for train, test in parts:
        steps = steps_per_round(len(train), config.train) * config.rounds * config.sample
        rows = steps * config.train.batch_size * config.train.accumulation * (1 + evaluate.alone)
        if config.method.penalty == "continual":
            rows += evaluations * min(config.continual.importance_examples, len(train))
        trained += rows / len(train) * _products(train, blocks, ends)
        evaluated += models * _products(test, blocks, ends)
        if evaluate.generate:
            batches = math.ceil(min(len(test), evaluate.generate_examples) / evaluate.batch_size)
            generated += models * batches * evaluate.max_new_tokens * 4 * (blocks + ends)
    # Forwards and backwards, and forwards again with checkpointing.
    trained *= 6 if config.model.gradient_checkpointing else 4
    hidden = hidden_size(base)
    speed = _EFFICIENCY * min(1.0, hidden / _WIDE) * _speed(hidden) * at_once
    return trained / speed, 2 * evaluated / speed + generated / _READING / at_once


def _products(examples: Sequence[Example], blocks: int, ends: int) -> float:
    """Return the weights that examples are multiplied by; the output head, only at targets."""
    targets = sum(int(example.is_target.sum()) for example in examples)
    return blocks * _tokens(examples) + ends * targets


def _speed(hidden: int) -> float:
    """Measure a matrix product of this model's size: operations per second of one process."""
    device, threads = default_device(), torch.get_num_threads()
    torch.set_num_threads(1)  # as an actor has
    rows = torch.ones(512, hidden, device=device, dtype=default_dtype(device))
    weights = torch.ones(hidden, 4 * hidden, device=device, dtype=rows.dtype)
    fastest = math.inf
    for _ in range(20):
        start = time.perf_counter()
        float((rows @ weights)[0, 0])  # waits for the device
        fastest = min(fastest, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 2 * rows.numel() * 4 * hidden / fastest


def _hidden_states(config: RunConfig, base: Path, trained: Sequence[list[Example]]) -> str:
    """Return a line with the bytes of hidden states that leave a client in a round."""
    width = {"float32": 4, "bfloat16": 2, "int8": 1}[config.split.wire_dtype]
    tokens = max(
        steps_per_round(len(rows), config.train) * _tokens(rows) / len(rows) for rows in trained
    )
    rows_per_step = config.train.batch_size * config.train.accumulation
    size = 2 * tokens * rows_per_step * hidden_size(base) * width
    return f"leaving a client in a round: about {size / 2**20:.1f} MiB of hidden states"


def _adapters(config: RunConfig, clients: int, base: Path) -> list[str]:
    """Return lines with the bytes of adapters, on the coordinator's disk and on the network."""
    state, _ = initial_adapter(config.model.name, with_names(base, config.adapter), config.seed)
    adapter = 4 * sum(state[name].numel() for name in config.adapter.trained_names(state, 1))
    with_importance = adapter * (1 + config.averages_importance)
    what = "its adapter and J" if config.averages_importance else "its adapter"
    lines = []
    if config.keep_rounds == "all":
        kept = config.rounds * with_importance / 2**20
        lines.append(f"checkpoints: {kept:.1f} MiB (keep-rounds = all)")
    sent = 2 * config.rounds * config.sampled(clients) * adapter / 2**30
    return [
        *lines,
        f"adapters in the whole run, to and from all clients: {sent:.2f} GiB",
        f"leaving a client in a round: {with_importance / 2**20:.1f} MiB ({what}), and metrics",
    ]


def _tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.tokens) for example in examples)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
