"""The app as researchers run it, with a real SuperLink in simulation mode and ``flwr run``."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from chambers.actors import resources_of
from chambers.superlink import private_superlink, run_app

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

LOGITS = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
assert not any("chambers" in name or name in ("finetuning", "federation") for name in sys.modules)
logits = []
for adapter in sys.argv[3:]:
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    model = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        logits.append(model(torch.arange(20)[None]).logits)
torch.save(logits, sys.argv[2])
"""


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    with private_superlink(tmp_path_factory.mktemp("flower")) as link:
        yield link


def settings(checkpoint: Path, client_folders: Path, folder: Path) -> dict:
    """Return a run config that writes only below a folder."""
    return {
        "rounds": 2,
        "min-nodes": 3,
        "model.name": str(checkpoint),
        "data.path": str(client_folders),
        "train.learning-rate": 5e-3,
        "train.accumulation": 2,
        "evaluate.generate": True,
        "evaluate.max-new-tokens": 8,
        "output-dir": str(folder / "runs"),
        "state-path": str(folder / "state"),
    }


@pytest.fixture
def config(checkpoint, client_folders, tmp_path):
    return settings(checkpoint, client_folders, tmp_path)


@pytest.fixture(scope="module")
def finished(superlink, checkpoint, client_folders, tmp_path_factory):
    """Return the results of a run with an actor for each client, and the lines of its log."""
    config = settings(checkpoint, client_folders, tmp_path_factory.mktemp("finished"))
    lines = []
    status = run_app(ROOT, superlink, config, 3, resources_of(3), lines.append)
    assert status == "finished:completed", b"".join(lines[-50:]).decode()
    return results_of(config), b"".join(lines).decode()


def results_of(config: dict) -> Path:
    (directory,) = Path(config["output-dir"]).iterdir()
    return directory


def test_a_run_writes_all_documented_results(finished, checkpoint, tmp_path):
    directory, shown = finished
    for expected in ("ROUND 2/2", "ROUGE-L", "alpha", "beta", "gamma", str(directory)):
        assert expected in shown
    assert "min-nodes" not in shown  # no warning: a simulation needs all of its clients
    assert {p.name for p in directory.iterdir()} == {
        *("adapters", "base-model.json", "checkpoints", "config.json", "metrics.jsonl"),
        *("report.html", "running.lock", "status.json", "summary.txt", "tensorboard"),
        "versions.json",
    }
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == [
        "round-0001.safetensors",
        "round-0002.safetensors",
    ]
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [e["participants"] for e in events if e["event"] == "round"] == [
        ["alpha", "beta", "gamma"]
    ] * 2
    losses = {(e["client"], e["model"]): e["loss"] for e in events if e["event"] == "evaluate"}
    for client in ("alpha", "beta", "gamma"):
        assert losses[client, "global"] < losses[client, "base"]
    check_adapters_load_elsewhere(directory, checkpoint, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["hierarchical", "client-batch"])
def test_a_split_run_whose_clients_train_at_once(
    superlink, config, deep_checkpoint, tmp_path, schedule
):
    """Three actors wait for each other at every third step, or in every micro-batch."""
    config |= {
        "strategy": "fl-glm",
        "rounds": 2,
        "model.name": str(deep_checkpoint),
        "split.schedule": schedule,
        "split.average-every": 3 if schedule == "hierarchical" else 0,
        "evaluate.generate": False,
    }
    assert run_app(ROOT, superlink, config, 3, resources_of(3)) == "finished:completed"
    directory = results_of(config)
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lanes = [e for e in events if e["event"] == "lane" and e["purpose"] == "train"]
    assert len(lanes) == 6 and not [e for e in lanes if e["error"]]
    losses = {(e["client"], e["model"]): e["loss"] for e in events if e["event"] == "evaluate"}
    for client in ("alpha", "beta", "gamma"):
        assert losses[client, "global"] < losses[client, "base"]
    check_adapters_load_elsewhere(directory, deep_checkpoint, tmp_path, rounds=2)


def check_adapters_load_elsewhere(
    directory: Path, checkpoint: Path, tmp_path: Path, rounds: int = 2
) -> None:
    """Load the adapters in a process without this project's code; compare logits."""
    from finetuning.adapters.adapter import attach_adapter, load_adapter
    from finetuning.model.base_model import load_base_model
    from finetuning.settings import AdapterSettings, ModelSettings

    base = load_base_model(ModelSettings(name=str(checkpoint)))
    model = attach_adapter(base.model, AdapterSettings(), str(checkpoint)).eval()
    adapters = directory / "adapters"
    folders = [adapters / "global", *sorted((adapters / "clients").iterdir())]
    output = tmp_path / "logits.pt"
    command = [sys.executable, "-I", "-c", LOGITS, checkpoint, output, *folders]
    subprocess.run(command, check=True, cwd=tmp_path)
    for folder, logits in zip(folders, torch.load(output), strict=True):
        load_adapter(model, load_file(folder / "adapter_model.safetensors"))
        with torch.no_grad():
            ours = model(torch.arange(20)[None]).logits
        torch.testing.assert_close(logits, ours, atol=1e-6, rtol=0)
        assert f"rounds = {rounds}" in (folder / "README.md").read_text()


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(finished, config, tmp_path):
    kill_after_round(1, config, tmp_path / "killed")
    resumed = config | {"resume": str(results_of(config))}
    with private_superlink(tmp_path / "resumed") as link:
        assert run_app(ROOT, link, resumed, 3, resources_of(1)) == "finished:completed"
    for path in ("global", "clients/alpha", "clients/beta", "clients/gamma"):
        one, other = (
            load_file(results / "adapters" / path / "adapter_model.safetensors")
            for results in (finished[0], results_of(config))
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def kill_after_round(number: int, config: dict, home: Path) -> None:
    """Execute a run in a subprocess, and kill the subprocess once a round's checkpoint exists."""
    code = (
        "import sys, json; from pathlib import Path\n"
        "from chambers.actors import resources_of\n"
        "from chambers.superlink import run_app, private_superlink\n"
        "with private_superlink(Path(sys.argv[1])) as link:\n"
        "    run_app(Path(sys.argv[2]), link, json.loads(sys.argv[3]), 3, resources_of(1))\n"
    )
    process = psutil.Popen(
        [sys.executable, "-c", code, str(home), str(ROOT), json.dumps(config)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    output = Path(config["output-dir"])
    while not list(output.glob(f"*/checkpoints/round-{number:04d}.safetensors")):
        assert process.poll() is None, "the run ended before it could be killed"
        psutil.wait_procs([process], timeout=0.05)
    everything = [*process.children(recursive=True), process]
    for victim in everything:
        # Flower itself ends some processes once their children are gone.
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    psutil.wait_procs(everything, timeout=20)
    later = list(output.glob(f"*/checkpoints/round-{number + 1:04d}.safetensors"))
    assert not later, "the run went on before it was killed"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rounds": -1}, "rounds = -1"),
        ({"min-nodes": 4, "node-timeout": 1.0}, "num-supernodes=4"),
        ({"data.path": "/nowhere"}, "/nowhere"),
    ],
    ids=["bad value", "too few nodes", "no data"],
)
def test_refused_before_training_with_a_failed_status(superlink, config, capfd, change, reason):
    status = run_app(ROOT, superlink, config | change, 3, resources_of(3))
    assert status.startswith("finished:failed: ")
    assert reason in status and reason in capfd.readouterr().out
    assert not list(Path(config["output-dir"]).glob("*")), "something half-written was left"


def test_nothing_is_left_running_after_the_superlink_ends(tmp_path, left_over):
    with private_superlink(tmp_path):
        assert left_over()
    assert not left_over()
