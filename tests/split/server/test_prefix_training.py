"""Training and evaluation with prefixes through lanes, and their share of the token budget."""

import time

import pytest
import torch

from finetuning.adapters.adapter import export_adapter, trainable_parameters
from finetuning.adapters.prefixes import SAVED
from finetuning.evaluation.held_out import held_out_loss
from finetuning.training.loop import train_round
from split.model.adapters import join_adapters, take_apart
from split.model.partition import partition_of
from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from tests.marks import nightly
from tests.split.clients import (
    STEPS,
    TRAIN,
    Client,
    assert_close,
    draw,
    round_of,
    serving,
    split_settings,
    tokens_taken,
)
from tests.split.clients import whole_model as trained_whole
from tests.split.model.test_prefixes import PREFIX, random_prefix

CLIPPED = TRAIN.model_copy(update={"max_gradient_norm": 0.2})


@pytest.mark.parametrize(
    ("schedule", "head", "tail"),
    [("serial", 2, 1), nightly("serial", 1, 1), nightly("serial", 0, 1), ("client-batch", 1, 1)],
)
def test_one_client_equals_centralised_training(base, schedule, head, tail):
    beginning = random_prefix(base)
    split = split_settings(schedule=schedule, head_blocks=head, tail_blocks=tail)
    apart = take_apart(beginning, partition_of(base, split))
    with serving(base, beginning, split, PREFIX, CLIPPED) as server:
        server.begin_round({"alpha": 9}, 0)
        client = Client("alpha", base, split, PREFIX)
        ends = client.train(server, apart["head"] | apart["tail"], train=CLIPPED)
        (account,) = server.finish_lanes()
        body = server.end_round({"alpha": 9})
    model = trained_whole(base, beginning, PREFIX)
    examples, local_round = round_of("alpha")
    report, _ = train_round(
        model, trainable_parameters(model.peft_model), examples, 0, local_round, CLIPPED
    )
    assert client.losses == pytest.approx(report.losses, abs=1e-5)
    final = export_adapter(model.peft_model)
    assert_close(join_adapters([ends, body]), final)
    assert (final[SAVED] - beginning[SAVED]).abs().max() > STEPS / 2 * TRAIN.learning_rate
    assert report.gradient_norm > CLIPPED.max_gradient_norm  # clipping had something to do
    assert (account.steps, account.error) == (STEPS, "")


def test_dropout_drops_a_share_of_the_prefixes_of_each_party(base):
    """A weight that is dropped from all six rows of the only step doesn't change."""
    beginning, dropping = random_prefix(base), PREFIX.model_copy(update={"prefix_dropout": 0.8})
    split = split_settings()
    apart = take_apart(beginning, partition_of(base, split))
    with serving(base, beginning, split, dropping) as server:
        server.begin_round({"alpha": 9}, 0)
        client = Client("alpha", base, split, dropping)
        trained = client.train(server, apart["head"] | apart["tail"], steps=1)
        server.finish_lanes()
        body = server.end_round({"alpha": 9})
    for name, own in apart.items():
        found = body if name == "body" else trained
        same = torch.cat([(found[n] == value).float().flatten() for n, value in own.items()])
        assert same.mean() == pytest.approx(0.8**6, abs=0.06), name


def test_a_split_model_measures_the_loss_of_the_whole(base):
    split, examples, state = split_settings(), draw(17, 1), random_prefix(base)
    parts = take_apart(state, partition_of(base, split))
    with serving(base, state, split, PREFIX) as server:
        client = Client("alpha", base, split, PREFIX)
        models = {"base": None, "global": parts["body"]}
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            model.choose("global", parts["head"] | parts["tail"])
            adapted = held_out_loss(model, examples, 0, 3).loss
            model.choose("base", None)
            bare = held_out_loss(model, examples, 0, 3).loss
            model.end()
    whole = trained_whole(base, state, PREFIX)
    assert adapted == pytest.approx(held_out_loss(whole, examples, 0, 3).loss, abs=1e-6)
    with whole.without_adapter():
        assert bare == pytest.approx(held_out_loss(whole, examples, 0, 3).loss, abs=1e-6)
    assert abs(adapted - bare) > 1e-3


def send(model, rows, columns, **fields) -> None:
    tensors = {"hidden": torch.zeros(rows, columns, 32), "lengths": torch.full((rows,), columns)}
    model.lane.send(Kind.HIDDEN, 0, 0, tensors, {"side": "right"} | fields)


@pytest.mark.parametrize("schedule", ["serial", "client-batch", "hierarchical"])
@pytest.mark.parametrize("longest", [2 * (8 + 5), 2 * (8 + 5) - 1])
def test_a_micro_batch_takes_its_prefixes_places_in_the_budget(base, schedule, longest):
    split = split_settings(schedule=schedule)
    client = Client("alpha", base, split, PREFIX)
    counts = {"targets": 3, "step_targets": 3, "micro_batches": 1}
    with serving(base, random_prefix(base), split, PREFIX) as server:
        server.begin_round({"alpha": 9}, 0)
        with client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            model.join(RoundPlan(3, 0, 3, 0), longest, time.monotonic() + 60)
            send(model, 2, 8, **counts)
            if longest == 2 * (8 + 5):
                assert model.lane.receive(30).kind is Kind.HIDDEN
                assert tokens_taken(server, split) == 2 * (8 + 5)
            else:
                with pytest.raises(LaneError, match="26 padded tokens; at most 25 were agreed on"):
                    model.lane.receive(30)
        server.finish_lanes()
        assert tokens_taken(server, split) == 0
