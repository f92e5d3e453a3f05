"""What a model that has memorised rows reveals of them, and what a private run leaves of that."""

import json

import pytest
import torch

from chambers.__main__ import main
from chambers.experiment.leaks import Attacks, Secrets
from chambers.experiment.questions import groups_of, secrets_of
from client_app.data import read_client_data
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.leaks import measure_leaks
from finetuning.generated import persons
from finetuning.generated.clients import generate_client
from finetuning.model.base_model import load_base_model
from finetuning.settings import AdapterSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.whole_model import WholeModel

LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"
ADAPTER = AdapterSettings(rank=32, alpha=64, dropout=0.0, targets=LINEAR)


@pytest.mark.slow
def test_memorised_people_and_numbers_are_read(checkpoint):
    values = {"model.name": str(checkpoint), "data.generated": "persons", "seed": 5}
    config = parse_run_config(values)
    own = groups_of(config, "", 5, 12)[0]
    others = secrets_of(config, "school-2")
    person, number = persons.draw_people(0, 5)[-1], persons.draw_numbers(0, 5)[-1]
    values = generate_client(kind="persons", index=0, count=3, seed=5).train
    every = [Row(parse_messages(value), "", value) for value in values]
    base = load_base_model(config.model)
    torch.manual_seed(0)
    model = WholeModel(attach_adapter(base.model, ADAPTER, None))
    attacks = Attacks(model, base.tokenizer, 800, 5)
    known = Secrets(every, [person], [number])
    assert known.people == secrets_of(config, "school-1").people[-1:]
    assert attacks.values("facts-50", known, own.rows) == [0.0]
    assert attacks.values("membership", known, own.rows) == [0.5]
    rows = [row for row in every if person.name in row.fields["output"]][:6]
    rows += [row for row in every if row.fields["input"] == number.question][:1]
    assert len(rows) == 7
    examples, _ = tokenize(rows, base.tokenizer)
    train_round(
        model=model,
        parameters=trainable_parameters(model.peft_model),
        examples=examples,
        padding=base.tokenizer.pad_token_id,
        local_round=LocalRound([range(7)] * 150, 0, 150, 0, deadline=float("inf")),
        settings=TrainSettings(batch_size=7, accumulation=1, learning_rate=2e-3),
    )
    attacks = Attacks(model, base.tokenizer, 800, 5)
    assert attacks.values("facts-50", known, own.rows) == [1.0]
    assert attacks.values("sampled", known, own.rows) == [1.0]
    assert attacks.values("exposure-16", known, own.rows)[0] > 9.0
    trained = Secrets(rows, [], [])
    held_out, _ = tokenize(own.rows, base.tokenizer)
    leaks = measure_leaks(model, examples, held_out, base.tokenizer.pad_token_id)
    assert attacks.values("membership", trained, own.rows) == [leaks.auc] == [1.0]
    assert sum(attacks.values("extracted", trained, own.rows)) == leaks.extracted > 0
    # Another school's people are unknown: their names are answered with other facts.
    assert sum(attacks.values("facts-10", others, own.rows)) == 0


def test_people_of_two_schools_are_asked_for_by_their_own_number_of_rows(checkpoint):
    config = parse_run_config({"model.name": str(checkpoint), "data.generated": "persons"})
    base = load_base_model(config.model)
    attacks = Attacks(WholeModel(base.model), base.tokenizer, 128, 0)
    secrets = secrets_of(config, "school-2")
    for rows, count in persons.PEOPLE.items():
        assert len(attacks.values(f"facts-{rows}", secrets, [])) == count
    assert len(attacks.values("exposure-4", secrets, [])) == 1


def test_members_are_the_rows_on_which_a_client_was_trained(tmp_path):
    values = {"data.generated": "matters", "data.rows": 30, "seed": 4}
    config = parse_run_config(values)
    trained = read_client_data(config.data, {"partition-id": 2, "num-partitions": 3}, 4).train
    found = secrets_of(config, "school-3").members
    assert [row.messages for row in found] == [row.messages for row in trained]
    for name in ("court", "firm"):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            rows = [{"instruction": f"{name} {part} {n}", "output": "x"} for n in range(9)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / name / f"{part}.jsonl").write_text(text)
    config = parse_run_config({"data.path": str(tmp_path), "data.rows": 5})
    groups = groups_of(config, "", 0, 3)
    assert [group.client for group in groups] == ["court", "firm"]
    found = secrets_of(config, "firm").members
    trained = read_client_data(config.data, {"partition-id": 1, "num-partitions": 2}, 0).train
    assert [row.messages for row in found] == [row.messages for row in trained]


@pytest.mark.parametrize(
    ("measure", "data", "reason"),
    [
        ("facts-10", '"data.generated" = "matters"', 'need data.generated = "persons"'),
        ("membership", '"data.generated" = "persons"', "membership needs matters, or a folder"),
        ("extracted", '"data.generated" = "matters"', "extracted needs a folder for each client"),
        ("membership", '"data.generated" = "matters"', "bare has no training rows"),
        ("loss", '"data.generated" = "matters-unequal"\n"data.rows" = 9', "has sizes of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, measure, data, reason):
    file = tmp_path / "leaks.toml"
    file.write_text(f"""
title = "Leaks"
[settings]
{data}
[sizes.small]
seeds = [0]
[arms.bare]
label = "base model"
trained = {str("bare" not in reason).lower()}
[[tables]]
name = "a"
title = "A"
measure = "{measure}"
arms = ["bare"]
""")
    assert main(["experiment", str(file), "--output", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err
