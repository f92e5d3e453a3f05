"""What an institution can show after a run: what left, what a row was used for, a signed record."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from chambers.in_process import InProcessGrid
from chambers.site.keys import open_node_key
from tests.chambers.conftest import ROOT
from tests.in_process import run_in_process
from tests.site_files import write_site


class Evidence:
    """The folder of an institution, the court, after a run, and the coordinator's record.

    Attributes:
        folder: The court's folder.
        rows: The court's rows.
        events: The coordinator's events.
        record: The coordinator's file of events.
    """

    def __init__(self, folder, rows, events):
        self.folder, self.rows, self.events = folder, rows, events
        self.record = folder.parent / "metrics.jsonl"
        self.record.write_text("".join(json.dumps(event) + "\n" for event in events))

    def command(self, *words, status=0):
        """Run a command of the court; return what it prints."""
        result = subprocess.run(
            [sys.executable, "-m", "chambers", "site", *map(str, words)],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder.parent)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert result.returncode == status, result.stdout + result.stderr
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def whole(checkpoint, client_folders, tmp_path_factory):
    place, nodes = tmp_path_factory.mktemp("institutions"), {}
    for number, (name, data) in enumerate({"court": "alpha", "clinic": "beta"}.items(), start=1):
        site = place / name
        (site / "state").mkdir(parents=True)
        (site / "policy.toml").write_text(
            f"paths = {json.dumps([str(checkpoint), str(place)])}\n"
            f"audit-log = '{site / 'state' / 'audit.jsonl'}'\nagreement = 'No. 7, 2026'\n"
            "purpose = 'summaries'\nnot-after = 2199-12-31\n[release]\nmax-auc = 1.0\n"
        )
        write_site(site, name, client_folders / data, policy=site / "policy.toml")
        open_node_key(site / "node")
        (site / "institution.env").write_text("COORDINATOR=coordinator.example.org:8443\n")
        policy = str(site / "policy.toml")
        nodes[number] = {"name": name, "data-path": str(client_folders / data), "policy": policy}
    values = {
        "strategy": "fedjudge-cl",
        "rounds": 2,
        "min-nodes": 2,
        "model.name": str(checkpoint),
        "state-path": str(place / "chambers"),
        "train.batch-size": 2,
        "train.accumulation": 1,
    }
    journal = run_in_process(values, place / "chambers", 2, InProcessGrid(values, nodes))
    return Evidence(place / "court", client_folders / "alpha", journal.events)


@pytest.fixture
def evidence(whole, tmp_path):
    shutil.copytree(whole.folder.parent, tmp_path / "copy")
    folder = tmp_path / "copy" / "court"
    for file in (folder / "policy.toml", folder / "site.toml"):
        file.write_text(file.read_text().replace(str(whole.folder.parent), str(folder.parent)))
    return Evidence(folder, whole.rows, whole.events)


def own_events(evidence, kind):
    return [e for e in evidence.events if (e["event"], e.get("client")) == (kind, "court")]


def test_site_and_coordinator_agree_on_what_left(evidence):
    said = evidence.command("audit", "--record", evidence.record)
    count = len(own_events(evidence, "audit"))
    assert f"equals {count} recorded lines" in said and count >= 5
    held_out = len((evidence.rows / "test.jsonl").read_text().splitlines())
    assert "adapters in rounds 1, 2: " in said
    assert f"computed from at least {held_out} rows" in said
    assert "purpose: summaries" in said and "agreement: No. 7, 2026" in said
    log = evidence.folder / "state" / "audit.jsonl"
    log.write_bytes(log.read_bytes().rpartition(b'{"line"')[0])
    assert "ok " in evidence.command("audit")
    said = evidence.command("audit", "--record", evidence.record, status=1)
    assert "lines were removed, or the log was lost" in said


def test_the_ledger_tells_which_rows_were_used_without_their_text(evidence, tmp_path):
    rows = [json.loads(line) for line in (evidence.rows / "train.jsonl").open()]
    asked = tmp_path / "asked.jsonl"
    unused = {key: f"{value} else" for key, value in rows[1].items()}
    asked.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], unused)))
    said = evidence.command("used", asked)
    assert "asked.jsonl:1: run" in said and "train in rounds 1, 2" in said
    assert "asked.jsonl:2: not used" in said
    ledger = b"".join(f.read_bytes() for f in (evidence.folder / "state" / "rows").iterdir())
    assert not any(str(value).encode() in ledger for value in rows[0].values())
    (evidence.folder / "state" / "rows").rename(evidence.folder / "elsewhere")
    assert "files of the row ledger are missing" in evidence.command("used", asked, status=2)


def test_a_verdict_on_the_global_adapter_leaves_without_figures(evidence):
    (verdict,) = own_events(evidence, "release")
    assert verdict["verdict"] == "passed"
    (file,) = (evidence.folder.parent / "chambers").glob("*/court/leaks.json")
    assert 0.0 <= json.loads(file.read_text())["auc"] <= 1.0
    assert "auc" not in evidence.record.read_text()


def test_a_record_is_signed_and_has_no_rows_and_no_paths(evidence, tmp_path):
    evidence.command("record")
    state, key = evidence.folder / "state", evidence.folder / "node.pub"
    page, file = (state / "record.html").read_text(), state / "record.json"
    facts = json.loads(file.read_text())["record"]
    (run,) = facts["runs"].values()
    assert run["rounds"] == [1, 2] and run["leak test"]["exceeded"] == []
    states = (evidence.folder.parent / "chambers").glob("*/court/**/*")
    kept = facts["kept on this disk"]["adapters and states of runs"]
    assert kept == sum(each.stat().st_size for each in states if each.is_file()) > 0
    assert facts["audit log"]["problems"] == [] and facts["agreement"] == "No. 7, 2026"
    assert "Opinion of the data protection officer" in page and "2199-12-31" in page
    assert "coordinator.example.org:8443" in page and "no licence named" in page
    lines = (evidence.rows / "train.jsonl").read_text().splitlines()
    texts = {str(value) for line in lines for value in json.loads(line).values()}
    for content in (page, file.read_text()):
        assert not any(text in content for text in texts if len(text) > 8)
        assert str(tmp_path) not in content and str(evidence.rows.parent) not in content
    assert "signed by court" in evidence.command("record", "--verify", file, "--key", key)
    file.write_text(file.read_text().replace("No. 7", "No. 8"))
    said = evidence.command("record", "--verify", file, "--key", key, status=2)
    assert "is not a record that the holder of" in said


def test_a_policy_that_has_ended_refuses_every_message(evidence, whole):
    policy = evidence.folder / "policy.toml"
    policy.write_text(policy.read_text().replace("2199-12-31", "2020-12-31"))
    said = evidence.command("check", evidence.folder, status=1)
    assert "the policy ended on 2020-12-31" in said
