"""The scripts in ``examples/``, run as a user runs them."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from finetuning.adapters.adapter import (
    attach_adapter,
    initial_adapter,
    load_adapter,
    save_adapter,
)
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.generation import generate_texts
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """Run a script with arguments, and return its output."""

    def run(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out.removesuffix("\n")

    return run


def test_use_adapter_answers_as_chambers_does(checkpoint, tmp_path, printed_by):
    settings = AdapterSettings(rank=2, dropout=0.0, targets="q_proj,v_proj,down_proj")
    state, config = initial_adapter(str(checkpoint), settings, 5)
    torch.manual_seed(6)
    state = {name: 0.5 * torch.randn_like(value) for name, value in state.items()}
    save_adapter(tmp_path / "adapter", state, config, "")
    question = "the court holds that"
    words = [tmp_path / "adapter", question, "--model", checkpoint, "--max-new-tokens", 12]
    printed = printed_by("use_adapter.py", *words)

    base = load_base_model(ModelSettings(name=str(checkpoint)))
    model = attach_adapter(base.model, settings, None)
    load_adapter(model, state)
    prompts = tokenize_prompts(prompt_rows([question]), base.tokenizer)
    expected = generate_texts(WholeModel(model), base.tokenizer, prompts, 1, 12)
    assert [printed] == expected
    assert printed


def test_split_without_flower_trains_an_adapter_for_peft(deep_checkpoint, tmp_path, printed_by):
    folder = tmp_path / "adapter"
    lines = printed_by("split_without_flower.py", folder, deep_checkpoint).splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    words = [folder, "the court holds that", "--model", deep_checkpoint, "--max-new-tokens", 8]
    assert printed_by("use_adapter.py", *words)
