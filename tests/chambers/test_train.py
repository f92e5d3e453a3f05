"""``chambers train``: what it is told, and a whole run whose model is then used."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.chambers.conftest import ROOT, refused, serve, told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train.batchsize=1"], "unknown key; did you mean train.batch-size?"),
        (["strategy=fl-gml"], "strategy = 'fl-gml'"),
        (["rounds=0"], "rounds = 0"),
        (["nonsense"], "nonsense is neither KEY=VALUE nor a file of settings"),
        ([str(ROOT / "README.md")], "README.md is not a file of settings"),
        ([str(ROOT / "presets" / "demo.toml"), "rounds=none"], "rounds = 'none'"),
        (["--clients", "-1"], "--clients -1"),
        (["--clients", "0"], "--clients 0"),
    ],
)
def test_what_can_t_be_trained_is_refused(capsys, words, reason):
    assert reason in refused(capsys, "train", *words)


@pytest.mark.parametrize(
    ("superlink", "reason"),
    [
        ("echo no such option; exit 1", "the SuperLink did not start:\nno such option"),
        (f"{sys.executable} -m http.server --bind 127.0.0.1 ${{5#--port=}}", "out of reach"),
    ],
)
def test_what_flower_can_t_do_is_said_in_words(tmp_path, capsys, monkeypatch, superlink, reason):
    """With other programs in the place of Flower's."""
    flwr = 'test "$1" = run || { echo out of reach >&2; exit 1; }'
    for name, script in (("flower-superlink", superlink), ("flwr", flwr)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert reason in refused(capsys, "train")
    finally:
        signal.signal(signal.SIGTERM, handler)


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
    """As many clients as there are folders; the institutions use what they took home."""
    (tmp_path / "preset.toml").write_text('strategy = "fl-glm"\n[train]\nlearning-rate = 0.05\n')
    data = os.path.relpath(client_folders, tmp_path)
    settings = (f"model.name={deep_checkpoint}", f"data.path={data}", "rounds=1")
    training = start(tmp_path, "preset.toml", *settings, "split.wire-dtype=float32")
    assert training.wait(300) == 0, (tmp_path / "output").read_text()[-3000:]
    (run,) = (tmp_path / "runs").iterdir()
    (lineage,) = (tmp_path / "state").iterdir()
    with serve(run, log=tmp_path / "log"):
        for client in ("alpha", "beta", "gamma"):
            for kind in ("global", "personalised"):
                words = ["generate", "--adapter", lineage / client / "adapters" / kind, "the court"]
                invitation = tmp_path / "invitations" / f"{client}.json"
                whole = told(capsys, *words)
                assert told(capsys, *words, "--invitation", invitation) == whole


@pytest.mark.slow
def test_ending_it_ends_the_run(checkpoint, client_folders, tmp_path, left_over):
    settings = (f"model.name={checkpoint}", f"data.path={client_folders}", "rounds=500")
    training = start(tmp_path, *settings)
    end = time.monotonic() + 200
    while not list(tmp_path.glob("runs/*/metrics.jsonl")):
        assert training.poll() is None and time.monotonic() < end
        time.sleep(0.5)
    training.send_signal(signal.SIGTERM)
    assert training.wait(120) == 130
    assert not left_over()
