"""A run's folder in the format that runs write, and a block server for it in another process."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chambers.__main__ import main
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import fingerprint
from server_app.results import Results
from strategies.journal import Progress
from tests.conftest import write_checkpoint

ROOT = Path(__file__).parent.parent.parent
CLIENTS = ("alpha", "beta")


def write_run(directory: Path, base: Path, **settings) -> Path:
    """Write a run's folder with adapters that have a different effect for each client."""
    config = parse_run_config(
        {
            "strategy": "fl-glm",
            "model.name": str(base),
            "adapter.rank": 2,
            "adapter.targets": "q_proj,v_proj,down_proj",
            "split.wire-dtype": "float32",
            **settings,
        }
    )
    directory.mkdir()
    state, peft_config = initial_adapter(str(base), config.adapter, 5)
    results = Results(directory, config, base, peft_config)
    results.describe(fingerprint(base))
    results.record({"event": "round", "round": 1, "participants": [*CLIENTS], "left_out": []})
    generator = torch.Generator().manual_seed(6)

    def drawn():
        return {n: 0.1 * torch.randn(v.shape, generator=generator) for n, v in state.items()}

    for client in CLIENTS:
        results.keep_personalised(client, drawn(), 1, 10)
    results.checkpoint(Progress("lineage", finished_rounds=1, evaluated=True), drawn())
    results.close()
    return directory


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """Write a Llama with unusually large weights, so that its texts vary."""
    directory = write_checkpoint(tmp_path_factory.mktemp("base"), blocks=4)
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.15 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def run_folder(base, tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", base)


@contextmanager
def serve(*words: str | Path, log: Path):
    """Run ``chambers serve``, and return its process once it is ready."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "chambers", "serve", *map(str, words)],
            cwd=log.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        lines = []
        while not (lines and lines[-1].startswith("serving")):
            line = process.stdout.readline()
            assert line, log.read_text()
            lines.append(line)
        yield process, lines
    finally:
        process.kill()
        process.wait(20)


@pytest.fixture(scope="session")
def served(run_folder, tmp_path_factory) -> Path:
    """Serve the run to its clients and to a third client; return the folder of invitations."""
    folder = tmp_path_factory.mktemp("served")
    clients = ("--clients", ",".join((*CLIENTS, "gamma")))
    with serve(run_folder, *clients, log=folder / "log") as (process, _):
        yield folder / "invitations"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def execute(capsys, *words: str | Path) -> str:
    """Run a command that must succeed, and return its output."""
    capsys.readouterr()
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


@contextmanager
def another_user():
    """If this process runs as root, switch to a different user for reading files."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def refused(capsys, *words: str | Path) -> str:
    """Run a command that must be refused, and return the reason."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.partition(": ")[2]
