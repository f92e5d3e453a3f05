"""``bench.continual``: runs that share round 1 equal whole ones, and intervals are Student's."""

import json
import statistics
import sys

import pytest

from bench import continual
from bench.continual_cells import Experiment, calibrate, cell
from bench.continual_table import document, paired_interval, recorded, table
from tests.in_process import run_in_process


@pytest.fixture
def experiment(values, tmp_path):
    changes = {"rounds": 3, "evaluate.every": 3, "continual.importance-examples": 4}
    return Experiment(tmp_path / "results", values | {"train.local-steps": 2} | changes)


@pytest.mark.parametrize("importance", ["server", "client"])
def test_a_cell_equals_a_whole_run(experiment, tmp_path, importance):
    result = cell(experiment, seed=2, weight=0.5, importance=importance)
    config = experiment.config(2, 0.5, importance)
    events = run_in_process(config, tmp_path / "whole", 3).events
    for model in ("global", "personalised"):
        last = {e["client"]: e["loss"] for e in events if e.get("model") == model}
        assert result[model] == last
    shares = [e["penalty_gradient_share"] for e in events if "penalty_gradient_share" in e]
    assert len(shares) == 6
    assert result["share"] == statistics.mean(shares) > 0
    # It is not repeated.
    (tmp_path / "results" / "seed-2-round-1").rename(tmp_path / "elsewhere")
    assert cell(experiment, seed=2, weight=0.5, importance=importance) == result


def test_the_weight_of_a_share_is_found_and_its_trials_are_kept(experiment):
    found = calibrate(experiment, 0, "server", [0.1])
    trials = json.loads((experiment.folder / "calibration-server.json").read_text())
    ((weight, share),) = [trial for trial in trials if trial[0] == found[0.1]]
    assert share == pytest.approx(0.1, rel=0.2)
    assert calibrate(experiment, 0, "server", [0.1]) == {0.1: weight}
    assert json.loads((experiment.folder / "calibration-server.json").read_text()) == trials


def test_a_folder_with_results_of_another_model_is_refused(values, tmp_path, monkeypatch):
    (tmp_path / "settings.json").write_text('{"model digest": "of another"}')
    command = ["bench.continual", str(tmp_path), "--model", values["model.name"]]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"results with other settings \(.*model digest.* differ"):
        continual.main()


def test_differences_are_paired_by_seed():
    # Mean 2, standard deviation 1, and 4.3027 standard errors of 1 / √3.
    mean, low, high = paired_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert mean - low == pytest.approx(high - mean)

    def result(seed, loss, share):
        losses = {"court": loss, "reasoning": loss + 2}
        own = {"seed": seed, "share": share, "distance": 0.5}
        return own | {"global": losses, "personalised": losses}

    base = [result(seed, loss, 0.0) for seed, loss in enumerate((1.0, 5.0, 9.0))]
    other = [result(seed, loss, 0.1) for seed, loss in enumerate((1.1, 5.2, 9.3))]
    shown = table([("client", 0.1, 0.02)], {("server", 0.0): base, ("client", 0.02): other})
    assert "| client | 10 % | 0.02 | 10.0 % |" in shown
    assert "+0.2000 [-0.0484, +0.4484]" in shown


def test_the_record_is_shown_with_what_its_intervals_say(tmp_path):
    def results(weight, *losses):
        return [
            {
                "seed": seed,
                "lambda": weight,
                "importance": "server",
                "share": 0.1,
                "distance": 0.5,
                "global": {"court": loss},
                "personalised": {"court": 3.0 + seed * (-1) ** int(weight * 10)},
            }
            for seed, loss in enumerate(losses)
        ]

    rows = [("server", 0.1, 0.1), ("server", None, 0.2)]
    by_weight = {
        ("server", 0.0): results(0.0, 2.0, 2.1, 2.2),
        ("server", 0.1): results(0.1, 1.5, 1.61, 1.7),
        ("server", 0.2): results(0.2, 2.5, 2.61, 2.7),
    }
    settings = {"model.name": str(tmp_path / "smollm2"), "rounds": 3, "train.local-steps": 5}
    about = {"model digest": "f" * 64, "versions": {"torch": "2.13.0"}}
    record = json.loads(json.dumps(recorded(settings, about, rows, by_weight)))
    assert str(tmp_path) not in json.dumps(record)
    shown = document(record)
    assert table(rows, by_weight) in shown
    # Both personalised models equal FedJudge-Base's, or differ from it with either sign.
    assert "Of 4 differences, 1 are below 0" in shown
    assert "1 are above 0" in shown
    assert "2 can't be told from 0 with 3 seeds" in shown
