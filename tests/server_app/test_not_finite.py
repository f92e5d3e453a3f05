"""A global adapter that most clients find unusable is discarded, and the previous one stored."""

from functools import partial
from pathlib import Path

import pytest

from federation.messages import METRICS, config_of
from federation.run_config import parse_run_config
from federation.run_folder import checkpoint_files
from server_app.checkpoint import load_run_checkpoint
from server_app.results import Results
from strategies.participants import TooFewClientsError
from strategies.replies import NotFiniteError
from tests.marks import nightly
from tests.server_app.runs import Altered, events, final, folders, newest, run
from tests.strategies.grids import same


def failing(kind: str, names: tuple[str, ...], number: int = 2):
    """Return a grid that makes some clients' numbers non-finite in a round."""

    def change(replies):
        for reply in replies:
            if config_of(reply)["name"] in names:
                if kind == "evaluate":
                    reply.content[METRICS]["global.loss"] = float("nan")
                else:
                    reply.content["config"]["problem"] = "the loss of step 1 is nan"
        return replies

    return partial(Altered, about=(kind, number), change=change)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [nightly("fedjudge-cl"), "fl-glm"])
def test_the_last_good_one_stays_and_is_resumed(values, deep_checkpoint, tmp_path, strategy):
    if strategy == "fl-glm":
        values |= {"model.name": str(deep_checkpoint), "split.schedule": "hierarchical"}
    values |= {"strategy": strategy, "train.local-steps": 2}
    here, there = (folders(tmp_path / name) for name in ("here", "there"))
    good = run(values | here, stop_after=(1, True))
    with pytest.raises(NotFiniteError, match=r"after round 2 is unusable.* at alpha, beta"):
        run(values | there, kind=failing("evaluate", ("alpha", "beta")))
    broken = newest(there)
    assert [file.stem for file in checkpoint_files(broken)] == ["round-0001"]
    assert same(final(good), final(broken))
    run(values | here | {"resume": str(good)})
    run(values | there | {"resume": str(broken)})
    assert same(final(good), final(broken))
    assert events(good) == events(broken)


@pytest.mark.slow
def test_one_client_alone_can_not_veto_an_adapter(values, tmp_path):
    """It can't even if it is the only one of two clients that replies."""
    values |= {"strategy": "fedjudge-base", "train.local-steps": 2}
    directory = run(values | folders(tmp_path / "here"), kind=failing("evaluate", ("gamma",)))
    assert [file.stem for file in checkpoint_files(directory)] == ["round-0002", "round-0003"]
    (missing,) = (e for e in events(directory) if e["event"] == "evaluation-missing")
    assert [left["client"] for left in missing["left_out"]] == ["gamma"]

    def gamma_alone(replies):
        return failing("evaluate", ("gamma",)).keywords["change"](replies)[1:]

    def of_two(values, nodes):
        nodes = {number: nodes[number] for number in (1, 3)}
        return Altered(values, nodes, ("evaluate", 2), gamma_alone)

    run(values | folders(tmp_path / "there") | {"min-nodes": 2}, kind=of_two)


@pytest.mark.parametrize(
    ("every", "error", "kept"),
    [(3, NotFiniteError, "round-0000"), (1, TooFewClientsError, "round-0001")],
)
def test_the_next_training_decides_where_nothing_was_evaluated(
    values, tmp_path, every, error, kept
):
    values |= {"strategy": "fedjudge-base", "train.local-steps": 2, "evaluate.every": every}
    here = folders(tmp_path / "here")
    with pytest.raises(error, match="alpha"):
        run(values | here, kind=failing("train", ("alpha", "beta")))
    broken = newest(here)
    assert checkpoint_files(broken)[-1].stem == kept
    (last,) = (e for e in events(broken) if e["event"] == "round" and e["round"] == 2)
    assert [left["client"] for left in last["left_out"]] == ["alpha", "beta"]


def test_a_resumed_run_also_deletes_an_unusable_adapter_that_was_published(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "train.local-steps": 1, "evaluate.every": 3}
    values |= folders(tmp_path / "here")
    broken = run(values, stop_after=(2, True))
    assert (broken / "adapters" / "global").is_dir()
    with pytest.raises(NotFiniteError, match="after round 2 is unusable"):
        run(values | {"resume": str(broken)}, kind=failing("train", ("alpha", "beta"), 3))
    assert not any((broken / "adapters").rglob("*.safetensors"))
    results = Results(broken, parse_run_config(values), Path(values["model.name"]), None)
    results.rewind_to(load_run_checkpoint(broken))
    results.close()
    assert checkpoint_files(broken)[-1].stem == "round-0001"
    assert results.personalised("alpha") is None  # the first round's adapter was replaced
