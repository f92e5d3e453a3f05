"""Runs of the ServerApp in this process, some of which end early, and what they write."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from safetensors.torch import load_file

from chambers.in_process import InProcessGrid
from federation.messages import to_arrays
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.base_model import locate
from finetuning.model.fingerprint import fingerprint
from finetuning.randomness import derive_seed
from server_app.main import STRATEGIES, find_checkpoint, open_directory
from server_app.main import main as server_app
from server_app.results import Results
from strategies.journal import Progress
from tests.strategies.grids import NODES


class PowerFailureError(Exception):
    """Simulates that the machine stops."""


class Altered(InProcessGrid):
    """Lets a function change the replies to the messages of one type in one round.

    Args:
        about: Type of the messages, and round.
        change: Receives the list of replies, and returns those that arrive.
    """

    def __init__(
        self,
        values: dict,
        nodes: dict,
        about: tuple[str, int],
        change: Callable[[list[Message]], list[Message]],
    ):
        super().__init__(values, nodes)
        self.about, self.change = about, change

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages))
        about = messages[0].metadata.message_type, messages[0].content["config"].get("round")
        return self.change(replies) if about == self.about else replies


def folders(place: Path) -> dict[str, str]:
    """Return settings with folders for the results and the clients' state of a run."""
    return {"output-dir": str(place), "state-path": f"{place}-state"}


def serve(values: dict, grid: InProcessGrid | None = None) -> Path:
    """Run the ServerApp to its end; return the newest folder of results."""
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    server_app(grid or InProcessGrid(values, NODES), context)
    return newest(values)


def newest(values: dict) -> Path:
    return max(Path(values["output-dir"]).glob("*_*"))


def run(
    values: dict,
    stop_after: tuple[int, bool] | None = None,
    kind: Callable[[dict, dict], InProcessGrid] = InProcessGrid,
    stop_before: int | None = None,
) -> Path:
    """Run as the ServerApp does, until the machine stops after or before a checkpoint."""
    config = parse_run_config(values)
    base = locate(config.model.name)
    state, peft_config = initial_adapter(
        config.model.name, config.adapter, derive_seed("adapter", config.seed)
    )
    directory = open_directory(config)
    checkpoint = find_checkpoint(config, directory)
    results = Results(directory, config, base, peft_config)
    progress = Progress("test")
    if checkpoint is not None:
        results.rewind_to(checkpoint)
        progress, state = checkpoint.progress, checkpoint.state
    results.describe(fingerprint(base))
    write = results.checkpoint

    def stopping(progress, state):
        if progress.finished_rounds == stop_before:
            raise PowerFailureError
        write(progress, state)
        if (progress.finished_rounds, progress.evaluated) == stop_after:
            raise PowerFailureError

    results.checkpoint = stopping
    strategy = STRATEGIES[config.strategy](config, fingerprint(base), progress, results)
    try:
        grid = kind(values, NODES)
        strategy.start(grid, to_arrays(state), config.rounds, timeout=0.0)
    except PowerFailureError:
        pass
    finally:
        results.close()
    return directory


def final(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all adapters in a run's folder."""
    return {
        f"{file.parent.name}.{name}": tensor
        for file in sorted((directory / "adapters").rglob("adapter_model.safetensors"))
        for name, tensor in load_file(file).items()
    }


def events(directory: Path) -> list[dict]:
    """Return the events without fields that depend on timing, such as a lane's bytes."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "bytes"))}
        for line in lines
    ]
