"""What a model that has memorised rows reveals of them, and what a private run leaves of that."""

import json
from statistics import fmean

import pytest
import torch

from chambers.__main__ import main
from chambers.experiment.command import RESULTS
from chambers.experiment.leaks import Attacks, Secrets
from chambers.experiment.questions import groups_of
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.leaks import measure_leaks
from finetuning.generated import persons
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.whole_model import WholeModel

LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"
ADAPTER = AdapterSettings(rank=32, alpha=64, dropout=0.0, targets=LINEAR)


def test_memorised_people_and_numbers_are_read(checkpoint):
    values = {"model.name": str(checkpoint), "data.generated": "persons", "seed": 5}
    config = parse_run_config(values)
    own, others, _ = groups_of(config, "", 5, 12)
    person = own.secrets.people[-1]
    number = own.secrets.numbers[-1]
    every = groups_of(config, "", 5, 12)[0].secrets.members
    base = load_base_model(config.model)
    torch.manual_seed(0)
    model = WholeModel(attach_adapter(base.model, ADAPTER, None))
    attacks = Attacks(model, base.tokenizer, 800, 5)
    known = Secrets(every, [person], [number])
    assert attacks.values("facts-50", known, own.rows) == [0.0] * 3
    assert attacks.values("membership", known, own.rows) == [0.5] * len(every)
    rows = [row for row in every if person.name in row.fields["output"]][:6]
    rows += [row for row in every if row.fields["input"] == number.question][:1]
    assert len(rows) == 7
    examples, _ = tokenize(rows, base.tokenizer)
    train_round(
        model=model,
        parameters=trainable_parameters(model.peft_model),
        examples=examples,
        padding=base.tokenizer.pad_token_id,
        local_round=LocalRound([range(7)] * 300, 0, 300, 0, deadline=float("inf")),
        settings=TrainSettings(batch_size=7, accumulation=1, learning_rate=2e-3),
    )
    attacks = Attacks(model, base.tokenizer, 800, 5)
    assert attacks.values("facts-50", known, own.rows) == [1.0] * 3
    assert attacks.values("sampled", known, own.rows) == [1.0] * 3
    assert attacks.values("exposure-16", known, own.rows)[0] > 9.0
    trained = Secrets(rows, [], [])
    held_out, _ = tokenize(own.rows, base.tokenizer)
    leaks = measure_leaks(model, examples, held_out, base.tokenizer.pad_token_id)
    assert fmean(attacks.values("membership", trained, own.rows)) == leaks.auc == 1.0
    assert sum(attacks.values("extracted", trained, own.rows)) == leaks.extracted > 0
    # Another school's people are unknown: their names are answered with other facts.
    assert sum(attacks.values("facts-10", others.secrets, own.rows)) == 0


def test_people_of_two_schools_are_asked_for_by_their_own_number_of_rows(checkpoint):
    config = parse_run_config({"model.name": str(checkpoint), "data.generated": "persons"})
    base = load_base_model(config.model)
    attacks = Attacks(WholeModel(base.model), base.tokenizer, 128, 0)
    group = groups_of(config, "", 0, 12)[1]
    found = {rows: attacks.values(f"facts-{rows}", group.secrets, group.rows) for rows in (10, 50)}
    assert {rows: len(values) for rows, values in found.items()} == {
        rows: 3 * count for rows, count in persons.PEOPLE.items() if rows > 1
    }
    assert len(attacks.values("exposure-4", group.secrets, group.rows)) == 1


@pytest.mark.slow
def test_a_private_arm_has_an_account_for_each_client(checkpoint, tmp_path, capfd):
    file = tmp_path / "private.toml"
    file.write_text(f"""
title = "Private"
questions = 4
[settings]
"data.generated" = "matters"
"data.rows" = 12
"model.name" = "{checkpoint}"
strategy = "fedjudge-base"
"train.optimizer-state" = "reset"
"evaluate.generate" = false
"evaluate.alone" = false
rounds = 2
"train.local-steps" = 2
"train.batch-size" = 4
"train.accumulation" = 1
[sizes.small]
seeds = [0]
[arms.private]
label = "private"
settings = {{ "adapter.rank" = 2 }}
policy.paths = ["{checkpoint.parent}"]
policy.privacy = {{ epsilon = 20.0, delta = 1e-3, noise-multiplier = 1.0 }}
[[tables]]
name = "membership"
title = "Membership"
measure = "membership"
arms = ["private"]
""")
    words = ["experiment", str(file), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    accounts = list((tmp_path / "out" / "state").rglob("privacy.jsonl"))
    lines = [list(map(json.loads, each.read_text().splitlines())) for each in accounts]
    assert [[line["round"] for line in own] for own in lines] == [[1, 2]] * 3
    assert {line["noise-multiplier"] for own in lines for line in own} == {1.0}
    about, *records = map(json.loads, (tmp_path / "out" / RESULTS).read_text().splitlines())
    assert about["runs"]["private-seed-0"]["policy"]["privacy"]["epsilon"] == 20.0
    assert [len(record["values"]) for record in records] == [12] * 3
    assert "| private | " in capfd.readouterr().out
    file.write_text(file.read_text().replace("epsilon = 20.0", "epsilon = 30.0"))
    assert main([*words, "--resume"]) == 2
    assert "different settings (policy)" in capfd.readouterr().err
    file.write_text(file.read_text().replace("epsilon", "epsilom"))
    assert main([*words, "--resume"]) == 2
    assert "arms.private.policy" in capfd.readouterr().err
