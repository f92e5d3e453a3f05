"""``chambers train``: its arguments, and a complete run whose model is then used."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from chambers.__main__ import main
from chambers.actors import Machine, count_actors, describe_memory, gpus_of_each, this_machine
from chambers.cluster import gpus_of_actor
from chambers.errors import END_SIGNALS, CommandError
from chambers.settings import read_settings
from federation.run_config import parse_run_config
from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import client_parameters
from tests.chambers.conftest import ROOT, execute, refused, serve
from tests.conftest import write_rows
from tests.gguf_files import write_gguf
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["lora_r=8"], "unknown key; did you mean adapter.rank?"),
        (["strategy=FedAvg"], 'FedAvg is the strategy "fedjudge-base"'),
        (["nonsense"], "nor a file of settings (No such file or directory) nor a preset (bas"),
        (["../presets/fedjudge"], "../presets/fedjudge is neither KEY=VALUE"),
        ([str(ROOT / "README.md")], "README.md is not a file of settings"),
        ([str(ROOT / "presets" / "demo.toml"), "rounds=none"], "rounds = 'none'"),
        (["--clients", "0", "demo", "rounds=1"], "'--clients': 0 is not in the range"),
        (["demo", "--clients", "0", "rounds=1"], "'--clients': 0 is not in the range"),
        (["--clients", "2", "min-nodes=3"], "more than the 2 simulated clients; add --clients 3"),
    ],
)
def test_what_cannot_be_trained_is_refused(capsys, words, reason):
    assert reason in refused(capsys, "train", *words)


def test_presets_are_named_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedjudge").mkdir()
    assert read_settings(["fedjudge", "rounds=2"])["rounds"] == 2
    assert read_settings(["fedjudge", "baselines/fedprox"])["strategy"] == "fedprox"
    (tmp_path / "fedjudge").rmdir()
    (tmp_path / "fedjudge").write_text("rounds = 7")
    assert read_settings(["fedjudge"]) == {"rounds": 7}


def test_texts_may_look_like_numbers(capsys, tmp_path):
    assert read_settings(["data.pool=1", "output-dir='07'", "data.partition-field=1e3"]) == {
        "data.pool": "1",
        "output-dir": str(Path.cwd() / "07"),
        "data.partition-field": "1e3",
    }
    file = tmp_path / "mine.toml"
    file.write_text("[data]\npool = 7\n", encoding="utf-8-sig")
    reason = "data.pool = 7: must be text, in quotation marks (allowed: text)"
    assert reason in refused(capsys, "train", file)
    file.write_text("text = 5\n", encoding="utf-8-sig")
    assert "text: Extra inputs" in refused(capsys, "experiment", file)


def test_what_is_missing_or_malformed_here_is_refused(capsys, checkpoint, client_folders, tmp_path):
    good = [f"model.name={checkpoint}", f"data.path={client_folders}"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    write_rows(tmp_path / "few.jsonl", 3, seed=1)
    write_rows(tmp_path / "clients" / "one" / "train.jsonl", 3, seed=1)
    (tmp_path / "clients" / "one" / "test.jsonl").write_text('{"instruction": "a"}\n')
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged") / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    quantized = shutil.copytree(checkpoint, tmp_path / "quantized")
    how = {"quantization_config": {"quant_method": "fp8"}}
    content = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(content | how))
    incomplete = shutil.copytree(checkpoint, tmp_path / "incomplete")
    index = {"weight_map": {"lm_head.weight": "model-2.safetensors"}}
    (incomplete / "model.safetensors.index.json").write_text(json.dumps(index))
    listed = shutil.copytree(checkpoint, tmp_path / "listed") / "config.json"
    listed.write_text("[]")
    for setting, reason in (
        (f"model.name={damaged.parent}", f"{damaged} is damaged ("),
        (f"model.name={listed.parent}", f"{listed} is not a JSON object"),
        (f"model.name={quantized}", "in bfloat16 with: chambers convert"),
        (f"model.name={incomplete}", "lacks model-2.safetensors; copy the checkpoint again"),
        ("model.name=/nowhere", "no config.json in /nowhere"),
        ("model.name=./nowhere", "there is no such file or folder"),
        (f"model.name={tmp_path / 'file'}", "is not a GGUF file"),
        (f"model.name={tmp_path / 'empty'}", "no config.json in"),
        ("data.path=/nowhere", "/nowhere\" doesn't exist"),
        ("data.path=nowhere/rows.jsonl", "there is no such file or folder"),
        (f"data.path={tmp_path / 'empty'}", "has no train.jsonl"),
        (f"data.path={tmp_path / 'few.jsonl'}", "3 rows can't be divided among 4 clients"),
        (f"data.path={client_folders}", "has 3 clients (alpha, beta, gamma)"),
        (f"output-dir={tmp_path / 'file' / 'runs'}", "can't be written to"),
        (f"state-path={tmp_path / 'file'}", "can't be written to"),
        ("data.pool=nobody", "nobody doesn't exist"),
        ("initial-adapter=/nowhere", "initial-adapter: there is no folder /nowhere"),
        ("resume=/nowhere", '/nowhere" is not a folder'),
        (f"resume={tmp_path / 'empty'}", "has no checkpoint"),
    ):
        clients = ["--clients", "4"] if "data.path" in setting else []
        assert reason in refused(capsys, "train", *good, setting, *clients), setting
    refusal = refused(capsys, "train", *good, f"data.path={tmp_path / 'clients'}")
    assert f"{tmp_path}/clients/one/test.jsonl:1: has no answer (output, " in refusal
    gguf = write_gguf(checkpoint, tmp_path / "model.gguf")  # nothing is wrong with the model
    refusal = refused(capsys, "train", f"model.name={gguf}", "data.path=/nowhere")
    assert "/nowhere\" doesn't exist" in refusal


@pytest.mark.parametrize("model", ["tiny", "deep_checkpoint"])
def test_a_split_that_leaves_the_server_no_block_is_refused(capsys, request, model):
    name = model if model == "tiny" else request.getfixturevalue(model)
    words = [f"model.name={name}", "strategy=fl-glm", "split.head-blocks=3"]
    assert f"none of the 4 blocks of {name}; " in refused(capsys, "train", *words)


def test_a_folder_with_a_built_in_name_is_not_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "smollm2", "another"):
        (tmp_path / name).mkdir()
    names = [read_settings([f"model.name={n}"])["model.name"] for n in ("tiny", "smollm2")]
    assert names == ["tiny", "smollm2"]
    assert read_settings(["model.name=another"])["model.name"] == str(tmp_path / "another")


def test_a_resumption_with_another_config_is_refused(capsys, tmp_path):
    """A key that the run's config lacks had its default value."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "round-0001.safetensors").touch()
    (run / "config.json").write_text(json.dumps({"seed": 1, "adapter.rank": 4}))
    refusal = refused(capsys, "train", f"resume={run}", "adapter.rank=8")
    assert "must be resumed with its original config:" in refusal
    assert refusal.splitlines()[1:] == ["  seed was 1 and is 0", "  adapter.rank was 4 and is 8"]
    (run / "config.json").write_text("{}")
    left_out = [{"client": "gamma", "reason": "it was late"}]
    event = {"event": "round", "participants": ["alpha", "beta"], "left_out": left_out}
    started = {"event": "evaluate", "round": 0, "model": "base"}
    evaluated = [started | {"client": name} for name in ("alpha", "beta", "gamma")]
    # A run that ended during its first round has no ``round`` event.
    for events in ([event | {"round": 1}], evaluated):
        lines = "".join(json.dumps(each) + "\n" for each in events)
        (run / "metrics.jsonl").write_text(lines)
        refusal = refused(capsys, "train", f"resume={run}", "--clients", 4)
        assert "has 3 clients; with 4, the rows would be divided differently" in refusal
    (run / "config.json").write_text("{")
    assert "config.json can't be read" in refused(capsys, "train", f"resume={run}")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Replace Flower's programs with scripts; return a function that writes them."""
    handlers = {each: signal.getsignal(each) for each in END_SIGNALS}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def write(**scripts):
        for name, script in scripts.items():
            file = tmp_path / name.replace("_", "-")
            file.write_text(f"#!/bin/bash\n{script}\n")
            file.chmod(0o700)

    yield write
    for each, handler in handlers.items():
        signal.signal(each, handler)


LOG = (
    r"\e[92mINFO \e[0m:      Starting\n\e[91mERROR \e[0m:     Simulation raised an exception\n"
    r"Traceback (most recent call last):\nMemoryError: no room\n2026-11-22 INFO [uvicorn] Ended\n"
)
LISTENING = f"{sys.executable} -m http.server --bind 127.0.0.1 ${{5#--port=}}"


@pytest.mark.parametrize(
    ("superlink", "reason"),
    [
        ("echo no such option; exit 1", "the SuperLink did not start:\nno such option"),
        (LISTENING, "out of reach"),
    ],
)
def test_errors_of_flower_are_explained(capsys, programs, tmp_path, superlink, reason):
    flwr = 'test "$1" = run || { echo out of reach >&2; exit 1; }'
    programs(flower_superlink=superlink, flwr=flwr)
    assert reason in refused(capsys, "train", f"output-dir={tmp_path / 'runs'}")


@pytest.mark.parametrize(
    ("status", "details", "exit_status", "last"),
    [
        ("finished:failed", "", 1, "chambers train: MemoryError: no room\n"),
        (
            "finished:failed",
            "Simulation failed with exception: An error was encountered. Ending simulation.",
            1,
            "chambers train: MemoryError: no room\n",
        ),
        (
            "finished:failed",
            "Simulation failed with exception: training can't start:\n  court: no rows",
            1,
            "chambers train: training can't start:\n  court: no rows\n",
        ),
        ("finished:completed", "N/A", 0, ""),
    ],
)
def test_a_failed_run_ends_with_the_reason_and_the_log(
    capfd, programs, tmp_path, status, details, exit_status, last
):
    run = {"status": status, "status-details": details}
    (tmp_path / "runs.json").write_text(json.dumps({"runs": [run]}))
    flwr = f'test "$1" = run && echo Traceback, "$@" || cat {tmp_path / "runs.json"}'
    programs(flower_superlink=f"printf '{LOG}'\n{LISTENING}", flwr=flwr)
    runs = tmp_path / "runs"
    words = ["--verbose"] if details else []
    assert main(["train", *words, "--clients", "99", f"output-dir={runs}"]) == exit_status
    shown = capfd.readouterr()
    assert shown.out.splitlines()[-1].startswith(f"run {status.removeprefix('finished:')} after ")
    assert ("Traceback, run " in shown.out) == bool(words)  # the run's log
    cores = this_machine().cores
    (log,) = runs.iterdir()
    last += f"log: {log}\n" if last else ""
    starting = "starting Flower and loading the base model\n"
    assert shown.err.endswith(f"99 clients take turns on {cores} actors\n{starting}{last}")
    said = log.read_text()
    assert f"init-args-num-cpus={cores}" in said
    assert ("MemoryError" in said) == bool(exit_status)


def test_what_flower_refuses_is_shown(capfd, programs, tmp_path):
    programs(
        flower_superlink=LISTENING,
        flwr="echo Loading; echo '│ no such federation │'; echo ╰───╯; exit 1",
    )
    assert main(["train", f"output-dir={tmp_path / 'runs'}"]) == 1
    reason = "chambers train: flwr run refused it: no such federation\n"
    assert reason in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "clients", "cores", "gib", "expected"),
    [
        ({}, 100, 2, 24, 2),
        ({}, 3, 16, 2, 1),
        ({}, 3, 2, 24, 3),
        ({}, 4, 2, 24, 2),
        ({"strategy": "fl-glm"}, 3, 2, 24, 2),
        ({"strategy": "fl-glm", "split.schedule": "hierarchical"}, 100, 2, 24, 2),
        ({"split.schedule": "client-batch"}, 100, 2, 24, 2),  # FedJudge ignores the schedule
        ({"strategy": "fl-glm", "split.schedule": "client-batch"}, 6, 2, 24, 6),
        (
            {"strategy": "fl-glm", "split.schedule": "client-batch"},
            7,
            2,
            24,
            "simulate only 6: ",
        ),
        (
            {"strategy": "fl-glm", "split.schedule": "client-batch"},
            6,
            2,
            4,
            "simulate only 2: ",
        ),
        (
            {"strategy": "fl-glm", "split.schedule": "hierarchical", "split.average-every": 50},
            *(33, 64, 256, "split.average-every trains all 33 clients at once"),
        ),
    ],
)
def test_actors_are_bounded_by_cores_and_memory(settings, clients, cores, gib, expected):
    config = parse_run_config(settings)
    machine = Machine(cores, gib * 2**30)
    if isinstance(expected, int):
        assert count_actors(config, clients, machine) == expected
        return
    with pytest.raises(CommandError, match=expected):
        count_actors(config, clients, machine)


def test_a_cluster_needs_a_shared_folder(capsys):
    assert main(["train", "--ray", "127.0.0.2:6379"]) == 2
    assert "--ray needs state-path=FOLDER" in capsys.readouterr().err


def test_clients_share_gpus():
    """Clients that take turns have one or all GPUs each; concurrent clients have equal shares."""
    machine = Machine(cores=16, memory=2**40, gpus=2)
    assert count_actors(parse_run_config({}), 5, machine) == 2
    together = {"strategy": "fl-glm", "split.schedule": "client-batch"}
    assert count_actors(parse_run_config(together), 5, machine) == 5
    assert count_actors(parse_run_config({"model.devices": "all"}), 5, machine) == 1
    assert gpus_of_each(actors=1, gpus=2) == 2
    assert gpus_of_each(actors=2, gpus=2) == 1
    assert gpus_of_each(actors=5, gpus=2) == 0.3333
    assert gpus_of_each(actors=5, gpus=0) == 0


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ({}, [1, 1, 0, 1], 1),
        ({}, [0, 0], 0),
        ({"model.devices": "all"}, [4, 2], 2),
        ({"strategy": "fl-glm", "split.schedule": "client-batch"}, [1, 1, 1, 1], 1),
        ({"strategy": "fl-glm", "split.schedule": "client-batch"}, [1], 0.5),
        ({"strategy": "fl-glm", "split.schedule": "client-batch"}, [3, 3, 1], 1),
    ],
)
def test_no_client_has_gpus_of_several_hosts(settings, gpus, expected):
    hosts = [Machine(cores=16, memory=2**40, gpus=each) for each in gpus]
    assert gpus_of_actor(parse_run_config(settings), 2, hosts) == expected
    # Three clients at once have room on two hosts only with one GPU each.
    together = parse_run_config({"strategy": "fl-glm", "split.schedule": "client-batch"})
    assert gpus_of_actor(together, 3, [Machine(16, 2**40, 3)] * 2) == 1


@pytest.fixture
def llama_7b(tmp_path):
    """Write a checkpoint with the sizes of Llama 2 7B in a sparse file."""
    (tmp_path / "config.json").write_text('{"hidden_size": 4096, "num_hidden_layers": 32}')
    block = {"attention": (4, 4096, 4096), "mlp": (3, 4096, 11008)}
    shapes = {f"model.layers.{i}.{name}": own for i in range(32) for name, own in block.items()}
    shapes |= dict.fromkeys(["model.embed_tokens", "lm_head"], (32000, 4096))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "actors", "gib", "expected"),
    [
        # 6.74 billion weights of 2 bytes; 1024 tokens · 32 blocks · 4096 · 67 bytes
        (
            {},
            1,
            30,
            r"about 21.7 GiB \(context 0.8, weights 12.6, activations 8.4\) for a client; 30",
        ),
        ({}, 1, 20, "This may not be enough: "),
        ({}, 2, 24, CommandError),
        ({"model.quantization": "nf4"}, 2, 24, "weights 3.7, activations 8.4.* 2 clients on a GPU"),
        ({"model.gradient-checkpointing": True}, 1, 24, "activations 0.5"),
        # two of 32 blocks; the server has the others, and a separate activation budget
        (
            {"strategy": "fl-glm"},
            1,
            40,
            r"weights 1.2, .* \(context 0.8, weights 11.3, .* the server",
        ),
    ],
)
def test_gpu_memory_is_planned_before_a_run(llama_7b, settings, actors, gib, expected):
    config = parse_run_config(
        {"data.max-length": 512, "train.batch-size": 2, "evaluate.batch-size": 2} | settings
    )
    machine = Machine(16, 2**40, gpus=1, gpu_memory=(gib * 2**30,))
    if expected is CommandError:
        with pytest.raises(CommandError, match="Use a smaller model"):
            describe_memory(config, llama_7b, actors, machine)
        return
    assert re.search(expected, describe_memory(config, llama_7b, actors, machine))


@pytest.mark.parametrize(("gib", "expected"), [(64, 3), (32, "simulate only 1: ")])
def test_activations_and_weights_of_the_server_count(llama_7b, gib, expected):
    """The server has 30 of 32 blocks, 22.6 GiB in float32; a client needs 5.5 GiB."""
    together = {"strategy": "fl-glm", "split.schedule": "client-batch", "data.max-length": 512}
    config = parse_run_config(together | {"model.name": str(llama_7b), "train.batch-size": 2})
    machine = Machine(16, gib * 2**30)
    if isinstance(expected, int):
        assert count_actors(config, 3, machine) == expected
        return
    with pytest.raises(CommandError, match=expected):
        count_actors(config, 3, machine)


def test_larger_models_leave_room_for_fewer_actors(deep_checkpoint):
    """A client has only two of a split model's four blocks."""
    whole = sum(p.numel() for p in load_file(deep_checkpoint / "model.safetensors").values())
    assert client_parameters(deep_checkpoint) == whole
    blocks = whole - client_parameters(deep_checkpoint, 0)
    assert client_parameters(deep_checkpoint, 2) == whole - blocks // 2


def test_a_model_of_the_hub_counts_as_one_in_a_folder(deep_checkpoint, tmp_path, monkeypatch):
    repository = tmp_path / "models--someone--model"
    shutil.copytree(deep_checkpoint, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    actors = [
        count_actors(parse_run_config({"model.name": name}), 16, Machine(16, 4 * 2**30))
        for name in (str(deep_checkpoint), "someone/model")
    ]
    assert actors[0] == actors[1]
    with pytest.raises(BaseModelError, match="nobody/model"):
        count_actors(parse_run_config({"model.name": "nobody/model"}), 1, Machine(16, 2**40))


def start(tmp_path, *words) -> psutil.Popen:
    return psutil.Popen(
        [
            *(sys.executable, "-m", "chambers", "train", *map(str, words)),
            *("output-dir=runs", f"state-path={tmp_path / 'state'}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=(tmp_path / "output").open("wb"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_what_was_trained_is_served_and_used(deep_checkpoint, client_folders, tmp_path, capsys):
    """Each folder is a client; the institutions use the run's adapters."""
    (tmp_path / "preset.toml").write_text('strategy = "fl-glm"\n[train]\nlearning-rate = 0.05\n')
    # Characters that TOML and JSON escape differently.
    data = "data 𠮷🙂"
    (tmp_path / data).symlink_to(client_folders)
    settings = (f"model.name={deep_checkpoint}", f"data.path={data}", "rounds=1")
    training = start(tmp_path, "preset.toml", *settings, "split.wire-dtype=float32")
    assert training.wait(900) == 0, (tmp_path / "output").read_text()[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    (lineage,) = (tmp_path / "state").iterdir()
    with serve(run, log=tmp_path / "log"):
        for client, kind in (
            ("alpha", "global"),
            ("beta", "personalised"),
            ("gamma", "personalised"),
        ):
            words = ["generate", "--adapter", lineage / client / "adapters" / kind, "the court"]
            invitation = tmp_path / "invitations" / f"{client}.json"
            whole = execute(capsys, *words)
            assert execute(capsys, *words, "--invitation", invitation) == whole


@pytest.mark.nightly
def test_a_run_refused_by_the_serverapp_names_reason_and_log(client_folders, tmp_path):
    settings = ("model.name=tiny", f"data.path={client_folders}", "adapter.targets=nothing")
    assert start(tmp_path, *settings).wait(900) == 1
    output = (tmp_path / "output").read_text()
    (log,) = (tmp_path / "runs").iterdir()
    *_, reason, where = output.splitlines()
    assert where == f"log: {log.relative_to(tmp_path)}" or where == f"log: {log}"
    assert reason.startswith("chambers train: ") and "adapter.targets" in reason
    assert "Traceback" in log.read_text() and "Traceback" not in output


@pytest.mark.slow
@pytest.mark.nightly
def test_ending_it_ends_the_run(checkpoint, client_folders, tmp_path, left_over):
    settings = (f"model.name={checkpoint}", f"data.path={client_folders}", "rounds=500")
    training = start(tmp_path, *settings)

    def has_begun():
        assert training.poll() is None, (tmp_path / "output").read_text()[-3000:]
        return list(tmp_path.glob("runs/*/metrics.jsonl"))

    wait_until(has_begun, 200)
    training.send_signal(signal.SIGHUP)  # as when a terminal is closed
    time.sleep(0.5)
    for other in (signal.SIGINT, signal.SIGTERM):  # these don't interrupt the shutdown
        training.send_signal(other)
    assert training.wait(120) == 130
    assert not left_over()
