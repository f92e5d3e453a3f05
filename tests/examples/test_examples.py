"""The scripts in ``examples/``, run as a user runs them."""

import runpy
import sys
from pathlib import Path

import torch

from finetuning.adapters.adapter import (
    attach_adapter,
    initial_adapter,
    load_adapter,
    save_adapter,
)
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.evaluation.generation import GREEDY, continue_prompts
from finetuning.model.base_model import load_base_model
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, ModelSettings

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_use_adapter_answers_as_chambers_does(checkpoint, tmp_path, monkeypatch, capsys):
    settings = AdapterSettings(rank=2, dropout=0.0, targets="q_proj,v_proj,down_proj")
    state, config = initial_adapter(str(checkpoint), settings, 5)
    torch.manual_seed(6)
    state = {name: 0.5 * torch.randn_like(value) for name, value in state.items()}
    save_adapter(tmp_path / "adapter", state, config, "")
    question = "the court holds that"
    words = ["use_adapter.py", str(tmp_path / "adapter"), question, "--max-new-tokens", "12"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLES / "use_adapter.py"), run_name="__main__")
    printed = capsys.readouterr().out.removesuffix("\n")

    base = load_base_model(ModelSettings(name=str(checkpoint)))
    model = attach_adapter(base.model, settings, None)
    load_adapter(model, state)
    prompts = tokenize_prompts(prompt_rows([question]), base.tokenizer)
    expected = continue_prompts(WholeModel(model), base.tokenizer, prompts, 12, GREEDY)
    assert [printed] == expected
    assert printed
