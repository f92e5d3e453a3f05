"""Training and evaluation with prefixes through lanes, and their share of the token budget."""

import time

import pytest
import torch

from split.model.adapters import take_apart
from split.model.partition import partition_of
from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from tests.split.clients import (
    Client,
    serving,
    split_settings,
    tokens_taken,
)
from tests.split.model.test_prefixes import PREFIX, random_prefix


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
