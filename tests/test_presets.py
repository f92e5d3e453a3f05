"""Presets are valid, alone and combined as documented, and baseline presets run."""

import json
import tomllib
from itertools import product
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict

from federation.run_config import parse_run_config
from tests.in_process import run_in_process

PRESETS = Path(__file__).parent.parent / "presets"
BASELINES = sorted((PRESETS / "baselines").glob("*.toml"))
FLOWERTUNE = sorted((PRESETS / "flowertune").glob("*.toml"))


def read(preset: Path) -> dict:
    return flatten_dict(tomllib.loads(preset.read_text()))


@pytest.mark.parametrize("preset", sorted(PRESETS.rglob("*.toml")), ids=lambda p: p.stem)
def test_presets_are_valid(preset):
    parse_run_config(read(preset))


def test_baselines_are_valid_after_any_other_preset():
    for whole, baseline in product(PRESETS.glob("*.toml"), BASELINES):
        parse_run_config(read(whole) | read(baseline))


@pytest.mark.parametrize("preset", FLOWERTUNE, ids=lambda p: p.stem)
def test_flowertunes_settings_run_on_rows_of_its_layout(values, tmp_path, preset):
    """With the test's model, three clients and one step; the layout is Alpaca's."""
    rows = tmp_path / "rows.json"
    layout = {"instruction": "Name a {}.", "input": "", "output": "A {}."}
    kinds = ["court", "judge", "law", "fee", "bail", "deed", "will", "writ", "oath"]
    rows.write_text(json.dumps([{k: t.format(w) for k, t in layout.items()} for w in kinds]))
    own = {"model.name", "model.quantization", "data.path", "rounds", "train.local-steps"}
    chosen = {k: v for k, v in read(preset).items() if k not in own and k != "evaluate.every"}
    chosen |= {"model.name": values["model.name"], "data.path": str(rows), "rounds": 1}
    journal = run_in_process({**chosen, "train.local-steps": 1, "min-nodes": 2}, tmp_path / "s", 3)
    (event,) = (e for e in journal.events if e["event"] == "round")
    assert len(event["participants"]) == 2


@pytest.mark.parametrize("name", ["bare", "center", "center-client", "fedbert"])
def test_baselines_run(values, deep_checkpoint, tmp_path, name):
    chosen = read(PRESETS / "baselines" / f"{name}.toml")
    own = values | {"rounds": 1, "train.local-steps": 1, "model.name": str(deep_checkpoint)}
    if chosen.get("data.pool") == "court":
        chosen["data.pool"] = "alpha"  # the test's clients have other names
    clients = 1 if "data.pool" in chosen else 3
    journal = run_in_process(own | chosen, tmp_path, clients)
    rounds = chosen.get("rounds", 1)
    trained = [e["client"] for e in journal.events if e["event"] == "train"]
    names = ["center"] if clients == 1 else ["alpha", "beta", "gamma"]
    assert trained == names * rounds
    evaluated = {
        (e["client"], e["model"], e["round"]) for e in journal.events if e["event"] == "evaluate"
    }
    assert {(name, "global" if rounds else "base", rounds) for name in names} <= evaluated
