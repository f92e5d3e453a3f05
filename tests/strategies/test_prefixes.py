"""Runs that train prefixes, whole and split, through the real strategies and the real ClientApp."""

import pytest
import torch
from safetensors.torch import load_file

from federation.messages import one_line
from federation.run_config import ConfigError, parse_run_config
from finetuning.adapters.adapter import initial_adapter
from finetuning.adapters.prefixes import SAVED
from tests.in_process import run_in_process
from tests.marks import nightly

CLIENTS = ("alpha", "beta", "gamma")


@pytest.fixture
def prefix_values(values):
    """A run config with which prefixes train in seconds."""
    return values | {
        "adapter.kind": "prefix",
        "adapter.prefix-length": 8,
        "train.learning-rate": 5e-2,
    }


def losses_of(journal):
    return {
        (e["round"], e["client"], e["model"]): e["loss"]
        for e in journal.events
        if e["event"] == "evaluate"
    }


def test_fedjudge_with_penalty_learns_prefixes(prefix_values, tmp_path):
    journal = run_in_process(prefix_values | {"continual.lambda": 0.01}, tmp_path, 3)
    losses = losses_of(journal)
    for client in CLIENTS:
        assert losses[3, client, "global"] < losses[0, client, "base"]
        assert losses[3, client, "global"] < losses[1, client, "global"]
    assert journal.adapters[3].keys() == {SAVED}
    shares = [
        e["penalty_gradient_share"]
        for e in journal.events
        if e["event"] == "train" and e["round"] > 1
    ]
    assert len(shares) == 6 and all(share > 0 for share in shares)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["serial", nightly("hierarchical")])
def test_fl_glm_learns_prefixes_and_leaves_whole_ones(
    prefix_values, deep_checkpoint, tmp_path, schedule
):
    """They give the losses and texts that were measured through lanes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from client_app.institution import open_institution
    from finetuning.evaluation.generation import generate_texts
    from finetuning.evaluation.held_out import held_out_loss
    from finetuning.model.tokenizer import load_tokenizer
    from finetuning.whole_model import WholeModel

    values = prefix_values | {
        "strategy": "fl-glm",
        "model.name": str(deep_checkpoint),
        "train.optimizer-state": "keep",
        "split.wire-dtype": "float32",
        "split.schedule": schedule,
        "evaluate.generate": True,
        "evaluate.generate-examples": 4,
        "evaluate.show-answers": 4,
        "evaluate.batch-size": 3,
        "evaluate.max-new-tokens": 12,
    }

    def answers(model, tokenizer, asked):
        texts = generate_texts(model, tokenizer, [prompt.tokens for prompt in asked], 3, 12)
        return [one_line(text) for text in texts]

    journal = run_in_process(values, tmp_path / "state", 3)
    losses, config = losses_of(journal), parse_run_config(values)
    shown = {
        (e["client"], e["model"]): [answer["text"] for answer in e["answers"]]
        for e in journal.events
        if e["event"] == "answers"
    }
    assert not [e for e in journal.events if e["event"] == "lane" and e["error"]]
    expected, _ = initial_adapter(str(deep_checkpoint), config.adapter, 0)
    assert journal.adapters[3].keys() == {SAVED}
    assert journal.adapters[3][SAVED].shape == expected[SAVED].shape
    for partition, client in enumerate(CLIENTS):
        assert losses[3, client, "global"] < losses[0, client, "base"]
        node = {"partition-id": partition, "num-partitions": 3}
        institution = open_institution(config, node)
        for kind in ("global", "personalised"):
            (directory,) = (tmp_path / "state").glob(f"*/{client}/adapters/{kind}")
            whole = AutoModelForCausalLM.from_pretrained(config.model.name)
            model = WholeModel(PeftModel.from_pretrained(whole, directory))
            loss = held_out_loss(model, institution.test, institution.padding, 8).loss
            assert loss == pytest.approx(losses[3, client, kind], abs=1e-5)
            tokenizer = load_tokenizer(institution.directory)
            written = answers(model, tokenizer, institution.asked)
            assert written == shown[client, kind]
            with model.without_adapter():
                bare = answers(model, tokenizer, institution.asked)
            assert bare == shown[client, "base"] != written
        kept = load_file(directory / "adapter_model.safetensors")
        assert torch.equal(kept[SAVED], journal.kept[client][SAVED])


def test_prefixes_count_among_the_tokens_of_a_run(prefix_values):
    generating = {"evaluate.generate": True, "evaluate.batch-size": 3, "evaluate.max-new-tokens": 7}
    values = prefix_values | generating | {"data.max-length": 50}
    config = parse_run_config(values)
    assert (config.max_batch_tokens, config.max_generated_tokens) == (
        3 * (8 + 50),
        3 * (8 + 50 + 7),
    )
    assert config.row_with_answer == {
        "adapter.prefix-length": 8,
        "data.max-length": 50,
        "evaluate.max-new-tokens": 7,
    }
    values |= {"adapter.kind": "lora"}
    config = parse_run_config(values)
    assert (config.max_batch_tokens, config.max_generated_tokens) == (3 * 50, 3 * (50 + 7))
    config = parse_run_config(values | {"evaluate.generate": False})
    assert (config.row_with_answer, config.max_generated_tokens) == ({"data.max-length": 50}, 0)


def test_prefixes_with_gradient_checkpointing_are_refused(prefix_values):
    with pytest.raises(ConfigError, match=r"model\.gradient-checkpointing = true") as caught:
        parse_run_config(prefix_values | {"model.gradient-checkpointing": True})
    assert 'adapter.kind = "prefix"' in str(caught.value)
