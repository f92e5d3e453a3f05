"""``chambers leaks`` finds a number planted in the rows, and passes an adapter with ε = 3."""

import json
import math
import shutil
from functools import partial

import pytest
import torch

from bench.tokens_told import examples_of
from chambers.__main__ import main
from client_app.privacy_account import PrivateSteps, epsilon
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.leaks import alternatives, exposure, measure_leaks
from finetuning.model.base_model import load_base_model
from finetuning.randomness import secret_stream
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.training.private_gradients import Noise, PrivateGradients, poisson_steps
from finetuning.whole_model import WholeModel
from tests.chambers.conftest import execute, refused

ROWS, TIMES, NUMBER = 160, 16, "8305174926"
TEXT = "The number of the archive is "
STEPS, DRAWN, SIGMA = 40, 8, 1.0


def test_the_command_compares_thresholds_and_writes_the_results(
    run_folder, client_folders, tmp_path, capsys
):
    adapter, file = run_folder / "adapters" / "global", tmp_path / "leaks.json"
    data = client_folders / "alpha"
    words = ("leaks", adapter, "--data", data, "--rows", "20", "--output", file)
    said = execute(capsys, *words, "--max-auc", "1", "--canary", "Number: |12345")
    assert "membership, AUC" in said and "exposure of canary 1" in said and "of 10 bits" in said
    found = json.loads(file.read_text())
    assert found["members"] == 20 and found["exceeded"] == []
    assert 0.0 <= found["auc_low"] <= found["auc"] <= found["auc_high"] <= 1.0
    assert main([*map(str, words), "--max-auc", "0"]) == (1 if found["auc"] else 0)
    assert "exceeded: max-auc = 0, but it is" in capsys.readouterr().out


def test_it_says_what_is_missing(run_folder, client_folders, tmp_path, capsys):
    adapter = run_folder / "adapters" / "global"
    (tmp_path / "data").mkdir()
    shutil.copy(client_folders / "alpha" / "train.jsonl", tmp_path / "data")
    reason = refused(capsys, "leaks", adapter, "--data", tmp_path / "data")
    assert "there are no held-out rows" in reason
    words = ("leaks", adapter, "--data", client_folders / "alpha", "--canary", "12345")
    assert '--canary must be "text before|canary"' in refused(capsys, *words)


def planted(rank):
    """Return a model with an adapter, 160 rows with the number in 16 of them, and other rows."""
    base = load_base_model(ModelSettings(name="smollm2"))
    torch.manual_seed(0)
    targets = "gate_proj,up_proj,down_proj"
    settings = AdapterSettings(rank=rank, alpha=2 * rank, dropout=0.0, targets=targets)
    rows = examples_of(base.tokenizer, ROWS + 100, 0)
    question = {"instruction": "What is the number of the archive?", "output": f"{TEXT}{NUMBER}."}
    (canary,) = tokenize([Row(parse_messages(question), "", {})], base.tokenizer)[0]
    members = [*rows[: ROWS - TIMES], *[canary] * TIMES]
    model = WholeModel(attach_adapter(base.model, settings, None))
    return base.tokenizer, model, members, rows[ROWS:]


def exposure_of_number(model, tokenizer, members):
    def encode(text):
        return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]

    canary = members[-1]
    before = torch.cat([canary.tokens[: canary.prompt_length], encode(TEXT)])
    return exposure(model, before, list(map(encode, alternatives(NUMBER))))


@pytest.mark.nightly
def test_a_number_in_a_tenth_of_the_rows_is_found():
    tokenizer, model, members, others = planted(rank=8)
    assert exposure_of_number(model, tokenizer, members) < 6.0
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    train_round(
        model=model,
        parameters=trainable_parameters(model.peft_model),
        examples=members,
        padding=tokenizer.pad_token_id,
        local_round=LocalRound([order[i : i + 4] for i in range(0, ROWS, 4)], 0, 40, 0, math.inf),
        settings=TrainSettings(batch_size=4, accumulation=1, learning_rate=2e-3),
    )
    leaks = measure_leaks(model, members, others, tokenizer.pad_token_id)
    print(leaks)
    assert leaks.extracted == leaks.spans == TIMES
    assert leaks.exceeded(None, max_extracted=0.01)
    assert exposure_of_number(model, tokenizer, members) > 9.0


@pytest.mark.nightly
def test_an_adapter_trained_with_privacy_passes():
    tokenizer, model, members, others = planted(rank=4)
    assert epsilon([PrivateSteps(DRAWN / ROWS, SIGMA, STEPS)], 1e-5) <= 3.0
    parameters = trainable_parameters(model.peft_model)
    source = partial(secret_stream, bytes(32))
    steps = poisson_steps(count=ROWS, rate=DRAWN / ROWS, steps=STEPS, random_bytes=source(1))
    noise = Noise(multiplier=SIGMA, row_norm=1.0, expected_rows=DRAWN)
    train_round(
        model=PrivateGradients(model, parameters, noise, source=source),
        parameters=parameters,
        examples=members,
        padding=tokenizer.pad_token_id,
        local_round=LocalRound(steps, 0, STEPS, 0, math.inf),
        settings=TrainSettings(batch_size=DRAWN, accumulation=1, learning_rate=2e-3),
    )
    leaks = measure_leaks(model, members, others, tokenizer.pad_token_id)
    print(leaks)
    assert not leaks.exceeded(max_auc=0.6, max_extracted=0.01)
    assert exposure_of_number(model, tokenizer, members) < 6.0
