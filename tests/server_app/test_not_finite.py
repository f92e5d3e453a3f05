"""A global adapter that most clients find unusable is discarded, and the previous one stored."""

import json

import pytest
import torch

from chambers.in_process import InProcessGrid
from federation.messages import METRICS, config_of
from federation.run_folder import checkpoint_files
from strategies.participants import TooFewClientsError
from strategies.replies import NotFiniteError
from tests.marks import nightly
from tests.server_app.test_resume import events, final, run


def failing(kind: str, names: tuple[str, ...]):
    """Return a grid that makes some clients' numbers non-finite in the second round."""

    class Failing(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = list(super().send_and_receive(messages))
            about = messages[0].metadata.message_type, messages[0].content["config"]["round"]
            for reply in replies:
                if about == (kind, 2) and config_of(reply)["name"] in names:
                    if kind == "evaluate":
                        reply.content[METRICS]["global.loss"] = float("nan")
                    else:
                        reply.content["config"]["problem"] = "the loss of step 1 is nan"
            return replies

    return Failing


@pytest.fixture
def here_and_there(tmp_path):
    """Return settings with separate folders for two runs."""
    return [
        {"output-dir": str(tmp_path / side), "state-path": str(tmp_path / f"{side}-state")}
        for side in ("here", "there")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [nightly("fedjudge-cl"), "fl-glm"])
def test_the_last_good_one_stays_and_is_resumed(
    values, deep_checkpoint, tmp_path, here_and_there, strategy
):
    if strategy == "fl-glm":
        values |= {"model.name": str(deep_checkpoint), "split.schedule": "hierarchical"}
    values |= {"strategy": strategy, "train.local-steps": 2}
    here, there = here_and_there
    good = run(values | here, stop_after=(1, True))
    with pytest.raises(NotFiniteError, match=r"after round 2 is unusable.* at alpha, beta"):
        run(values | there, kind=failing("evaluate", ("alpha", "beta")))
    (broken,) = (tmp_path / "there").iterdir()
    assert [file.stem for file in checkpoint_files(broken)] == ["round-0001"]
    one, other = final(good), final(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    run(values | here | {"resume": str(good)})
    run(values | there | {"resume": str(broken)})
    one, other = final(good), final(broken)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert events(good) == events(broken)


@pytest.mark.slow
def test_one_client_alone_can_not_veto_an_adapter(values, here_and_there):
    """It can't even if it is the only one of two clients that replies."""
    here, there = here_and_there
    values |= {"strategy": "fedjudge-base", "train.local-steps": 2}
    directory = run(values | here, kind=failing("evaluate", ("gamma",)))
    assert [file.stem for file in checkpoint_files(directory)] == ["round-0002", "round-0003"]
    (missing,) = (e for e in events(directory) if e["event"] == "evaluation-missing")
    assert [left["client"] for left in missing["left_out"]] == ["gamma"]

    class Silent(failing("evaluate", ("gamma",))):
        def get_node_ids(self):
            return [1, 3]

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            about = messages[0].metadata.message_type, messages[0].content["config"]["round"]
            replies = super().send_and_receive(messages)
            return replies[1:] if about == ("evaluate", 2) else replies

    run(values | there | {"min-nodes": 2}, kind=Silent)


@pytest.mark.parametrize(
    ("every", "error", "kept"),
    [(3, NotFiniteError, "round-0000"), (1, TooFewClientsError, "round-0001")],
)
def test_the_next_training_decides_where_nothing_was_evaluated(
    values, tmp_path, here_and_there, every, error, kept
):
    values |= {"strategy": "fedjudge-base", "train.local-steps": 2, "evaluate.every": every}
    here, _ = here_and_there
    with pytest.raises(error, match="alpha"):
        run(values | here, kind=failing("train", ("alpha", "beta")))
    (broken,) = (tmp_path / "here").iterdir()
    assert checkpoint_files(broken)[-1].stem == kept
    rounds = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    (last,) = (e for e in rounds if e["event"] == "round" and e["round"] == 2)
    assert [left["client"] for left in last["left_out"]] == ["alpha", "beta"]
