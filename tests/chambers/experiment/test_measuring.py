"""Scores that experiments measure, compared with those that runs measure."""

import pytest

from chambers.experiment.measuring import Measuring
from chambers.experiment.questions import groups_of
from federation.run_config import parse_run_config
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.base_model import load_base_model
from finetuning.model.whole_model import WholeModel


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
