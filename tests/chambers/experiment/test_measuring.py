"""Scores that experiments measure, compared with those that runs measure."""

import json

import pytest
import torch

from chambers.experiment.measuring import Measuring, measure_untrained
from chambers.experiment.plan import Experiment
from chambers.experiment.questions import groups_of
from federation.run_config import parse_run_config
from finetuning.data.prompts import tokenize_prompts
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.held_out import held_out_loss
from finetuning.generated import matters
from finetuning.model.base_model import load_base_model
from finetuning.whole_model import WholeModel


def test_the_constant_answer_to_wsc_is_that_no_noun_is_right(tmp_path):
    rows = [
        {"text": "Ann saw Eve; she left.", "target": target, "idx": number, "label": label}
        for number, (target, label) in enumerate(
            [
                ({"span1_text": "Ann", "span2_text": "she", "span1_index": 0, "span2_index": 3}, a)
                for a in (False, True, False)
            ]
        )
    ]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[1]) + "\n")
    config = parse_run_config({"data.path": str(tmp_path), "data.task": "wsc"})
    table = {"name": "a", "title": "", "measure": "accuracy", "arms": ["one"]}
    arms, sizes = {"one": {"label": "one"}}, {"small": {"seeds": [0]}}
    experiment = Experiment.model_validate(
        {"title": "", "sizes": sizes, "arms": arms, "tables": [table]}
    )
    (record,) = measure_untrained(experiment, 0, config, groups_of(config, "", 0, 3), tmp_path)
    assert record.values == [1.0, 0.0, 1.0]


def test_a_loss_is_the_held_out_loss_of_each_question(checkpoint):
    config = parse_run_config({"model.name": str(checkpoint), "data.generated": "matters"})
    groups = groups_of(config, "", seed=3, count=5)
    found = {group: values for group, _, values in Measuring(config).values(None, groups, ["loss"])}
    base = load_base_model(config.model)
    model, padding = WholeModel(base.model), base.tokenizer.pad_token_id
    for group in groups:
        examples, _ = tokenize(group.rows, base.tokenizer, config.data.max_length)
        expected = [held_out_loss(model, [example], padding, 1).loss for example in examples]
        assert found[group.name] == pytest.approx(expected, rel=1e-4)


def test_an_article_is_right_if_it_is_the_likeliest(checkpoint):
    config = parse_run_config({"model.name": str(checkpoint), "data.generated": "matters"})
    groups = groups_of(config, "", seed=3, count=8)
    base = load_base_model(config.model)
    model, tokenizer = base.model, base.tokenizer

    def log_probability(prompt, beginning):
        answer = tokenizer(beginning, add_special_tokens=False, return_tensors="pt").input_ids[0]
        tokens = torch.cat([prompt, answer])[None]
        with torch.no_grad():
            values = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return values.gather(1, answer[:, None]).sum().item()

    found = Measuring(config).values(None, groups, ["article"])
    for group, (_, _, values) in zip(groups, found, strict=True):
        expected = []
        for prompt, article in zip(
            tokenize_prompts(group.rows, tokenizer), group.articles, strict=True
        ):
            scores = {a: log_probability(prompt, text) for a, text in matters.beginnings().items()}
            expected.append(float(max(scores, key=scores.get) == article))
        assert values == expected
