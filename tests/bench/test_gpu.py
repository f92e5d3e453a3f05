"""The measurement for GPUs, run from end to end without one."""

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.gpu import SIZES, devices


def test_sizes_are_what_they_are_called(tmp_path):
    for size, billions in (("1b", 1), ("3b", 3), ("7b", 7)):
        shape = SIZES[size]
        matrices = 4 * shape.hidden**2 + 3 * shape.hidden * (shape.hidden * 11 // 4)
        weights = shape.blocks * matrices + 2 * shape.vocabulary * shape.hidden
        assert 0.9e9 * billions < weights < 1.3e9 * billions
        assert shape.hidden % shape.head_width == 0


def test_random_weights_are_a_checkpoint(tmp_path):
    SIZES["tiny"].save(tmp_path, torch.bfloat16)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > SIZES["tiny"].blocks, "a file for each block"
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert 0.01 < model.model.layers[1].mlp.up_proj.weight.float().std() < 0.03


def test_a_full_disk_is_noticed_first(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(SystemExit, match="TMPDIR"):
        SIZES["7b"].save(tmp_path, torch.bfloat16)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs a GPU"):
        devices("cuda")


@pytest.mark.slow
def test_it_runs_from_end_to_end():
    process = subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu", "--size", "tiny", "--device", "cpu"),
            *("--clients", "2", "--schedules", "client-batch", "--pairs", "1", "--columns", "16"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "client-batch" in process.stdout
