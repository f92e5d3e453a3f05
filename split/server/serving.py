"""Load the body of a model and serve it to the clients of a run."""

from collections.abc import Mapping
from pathlib import Path

from finetuning.adapters.adapter import State
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from split.model.devices import body_devices
from split.model.loading import load_parts
from split.model.partition import PartyName, partition_of
from split.server.block_server import BlockServer
from split.settings import SplitSettings


def serve(
    directory: Path,
    model: ModelSettings,
    state: Mapping[PartyName, State],
    *,
    split: SplitSettings,
    adapter: AdapterSettings,
    train: TrainSettings,
    longest: int,
    columns: int,
    run: str = "split",
    rounds: int = 1,
    minimum: int = 1,
    max_cached_tokens: int = 0,
) -> BlockServer:
    """Load the body and return a running block server, a context manager that stops it on exit.

    Args:
        directory: Directory of the checkpoint.
        model: Precision and quantisation of the body.
        state: Initial adapters of the whole model, by party.
        split: Partition, schedule, limits and addresses.
        adapter: Kind, rank, scale, dropout and targets, or prefix length.
        train: Settings of the optimizers.
        longest: Number of padded tokens of the largest micro-batch that any client may send,
            prefixes included.
        columns: Number of tokens of the longest row that a client may train on or evaluate.
        run: Name of the run in handshakes.
        rounds: Number of rounds of the run.
        minimum: Minimum number of clients of a round, if clients train together.
        max_cached_tokens: Maximum number of padded tokens in a batch for which a client generates
            text. These tokens count towards the activation budget.

    Raise ``BaseModelError`` if the body can't be loaded. Raise ``OSError`` if the server can't
    listen on the address in ``split.listen``.
    """
    body = load_parts(
        settings=model,
        directory=directory,
        partition=partition_of(directory, split),
        parties=("body",),
        devices=body_devices(split),
    )["body"]
    return BlockServer(
        body=body,
        state=state,
        split=split,
        adapter=adapter,
        train=train,
        run=run,
        rounds=rounds,
        longest=longest,
        columns=columns,
        minimum=minimum,
        max_cached_tokens=max_cached_tokens,
    )
