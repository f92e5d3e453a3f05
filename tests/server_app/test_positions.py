"""Rows that are longer than a model's positions are refused before anything is trained."""

import json

import pytest
import torch
import transformers

from chambers.in_process import InProcessGrid
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_base_model
from finetuning.model.positions import check_positions
from finetuning.settings import ModelSettings
from tests.server_app.runs import serve

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
ROW = {"adapter.prefix-length": 14, "data.max-length": 50}


@pytest.fixture
def saved(tmp_path, checkpoint):
    """Return a function that saves a random model with 64 positions, and a tokenizer."""

    def save(architecture: str):
        changes = {"GPTJ": {"rotary_dim": 4}, "Bloom": {"max_position_embeddings": None}}
        sizes = SIZES | changes.get(architecture, {})
        config = getattr(transformers, f"{architecture}Config")(**sizes)
        directory = tmp_path / architecture
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        transformers.AutoTokenizer.from_pretrained(checkpoint).save_pretrained(directory)
        return directory

    return save


@pytest.mark.parametrize("architecture", ["OPT", "GPTJ"])
def test_rows_beyond_a_table_of_positions_are_refused(saved, architecture):
    directory = saved(architecture)
    check_positions(directory, ROW)
    with pytest.raises(BaseModelError) as caught:
        check_positions(directory, ROW | {"data.max-length": 51})
    for expected in (
        "adapter.prefix-length + data.max-length = 14 + 51 = 65 positions",
        architecture,
        "has only 64",
        "lower adapter.prefix-length or data.max-length",
    ):
        assert expected in str(caught.value)
    with pytest.raises(BaseModelError, match=r"can take data\.max-length = 65 positions"):
        check_positions(directory, {"data.max-length": 65})
    # The model has 64 positions, and fails with more.
    model = load_base_model(ModelSettings(name=str(directory))).model
    with torch.no_grad():
        model(input_ids=torch.ones(1, 64).long())
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.ones(1, 65).long())


@pytest.mark.parametrize(("kind", "most"), [("longrope", 40), ("dynamic", 64)])
def test_positions_that_depend_on_other_rows_are_refused(saved, kind, most):
    """Beside a longer row, a short row would have different positions."""
    directory = saved("Phi3" if kind == "longrope" else "Llama")
    config = json.loads((directory / "config.json").read_text())
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaling = factors if kind == "longrope" else {"factor": 2.0}
    config["rope_parameters"] |= {"rope_type": kind, **scaling}
    config["original_max_position_embeddings"] = 40
    (directory / "config.json").write_text(json.dumps(config))
    check_positions(directory, {"data.max-length": most})
    reason = (
        f"computes all positions of a batch differently if a row takes more than {most}; lower data"
    )
    with pytest.raises(BaseModelError, match=reason):
        check_positions(directory, {"data.max-length": most + 1})


@pytest.mark.parametrize(("architecture", "warned"), [("Llama", True), ("Bloom", False)])
def test_rows_beyond_trained_positions_cause_a_warning(saved, architecture, warned, caplog):
    directory = saved(architecture)
    check_positions(directory, ROW)
    assert not caplog.records
    check_positions(directory, ROW | {"evaluate.max-new-tokens": 20})
    assert ("14 + 50 + 20 = 84 positions" in caplog.text and "64" in caplog.text) == warned


@pytest.mark.parametrize("strategy", ["fedjudge-cl", "fl-glm"])
def test_a_run_is_refused_before_it_begins(saved, values, tmp_path, strategy):
    values |= {
        "strategy": strategy,
        "model.name": str(saved("GPT2")),
        "adapter.kind": "prefix",
        "adapter.prefix-length": 14,
        "data.max-length": 51,
        "output-dir": str(tmp_path / "results"),
    }
    with pytest.raises(BaseModelError, match=r"adapter\.prefix-length \+ data\.max-length"):
        serve(values, InProcessGrid(values, {}))
