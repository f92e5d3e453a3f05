"""A changed audit log is noticed, from the log alone or from what a coordinator has recorded."""

import json
import os
import random
import subprocess
import sys

import pytest

from chambers.in_process import InProcessGrid
from client_app.audit import AuditLog
from client_app.audit_report import audit
from tests.chambers.conftest import ROOT
from tests.in_process import run_in_process
from tests.site_files import write_site

COUNT = 30


@pytest.fixture
def log(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(COUNT):
        log.append({"event": "reply", "run": "run-1", "round": number, "kind": "train"})
    return log


def change(lines, at):
    lines[at] = lines[at].replace(b'"train"', b'"query"')


def remove(lines, at):
    del lines[at]


def insert(lines, at):
    lines.insert(at, b'{"event": "reply"}\n')


def repeat(lines, at):
    lines.insert(at, lines[at])


def swap(lines, at):
    lines[at - 1], lines[at] = lines[at], lines[at - 1]


def damage(lines, at):
    lines[at] = lines[at][:20] + b"\n"


@pytest.mark.parametrize("alter", [change, remove, insert, repeat, swap, damage])
def test_the_log_alone_shows_altered_lines(log, alter):
    assert not audit(log).problems
    content = log.path.read_bytes().splitlines(keepends=True)
    at = random.Random(alter.__name__).randrange(1, COUNT - 1)
    alter(content, at)
    log.path.write_bytes(b"".join(content))
    assert audit(log).problems
    log.append({"event": "later"})  # a later line doesn't hide it
    assert audit(log).problems


def test_a_record_shows_a_changed_end_and_a_restored_log(log):
    whole = log.path.read_bytes()
    recorded = [(audit(log).lines, audit(log).digest)]
    assert not audit(log, recorded).problems
    lines = whole.splitlines(keepends=True)
    for content in (whole[: whole.rindex(b"{")], b"", b"".join(lines[:5])):
        log.path.write_bytes(content)
        (problem,) = audit(log, recorded).problems
        assert f"a coordinator has recorded line {COUNT}, but the log ends" in problem
    while audit(log).lines < COUNT:  # a copy was restored, and continued
        log.append({"event": "reply"})
    (problem,) = audit(log, recorded).problems
    assert f"line {COUNT} with another digest" in problem


def test_rotated_files_are_one_log(log):
    log.path.rename(log.path.with_name("audit.jsonl.2"))
    log.append({"event": "reply", "run": "run-2"})
    log.path.rename(log.path.with_name("audit.jsonl-20261128"))
    log.path.with_name("audit.jsonl.bak").write_text("a copy, which counts for nothing\n")
    number, digest = log.append({"event": "reply", "run": "run-3"})
    assert number == COUNT + 2
    found = audit(log, [(number, digest)])
    assert not found.problems and set(found.runs) == {"run-1", "run-2", "run-3"}
    assert len(list(log.lines())) == COUNT + 2
    log.path.with_name("audit.jsonl.2").unlink()
    assert f"line {COUNT + 1} follows line 0" in audit(log).problems[0]


def test_lines_without_numbers_are_counted_at_the_beginning_alone(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    old = AuditLog(log.path, is_chained=False)
    for _ in range(3):
        old.append({"event": "reply", "run": "old"})
    assert log.append({"event": "reply", "run": "new"})[0] == 4
    found = audit(log)
    assert (found.unchained, found.lines, found.problems) == (3, 4, [])
    old.append({"event": "reply"})
    assert "was inserted" in audit(log).problems[0]


def site_command(folder, *words, status=0):
    """Run a command of an institution in its folder, as its user; return the output."""
    command = [sys.executable, "-m", "chambers", "site", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )
    assert result.returncode == status, result.stderr
    return result.stdout


def test_site_and_coordinator_agree_on_what_left(values, client_folders, tmp_path):
    nodes = {}
    for number, (name, folder) in enumerate({"court": "alpha", "clinic": "beta"}.items(), start=1):
        site, data = tmp_path / name, client_folders / folder
        (site / "state").mkdir(parents=True)
        (site / "policy.toml").write_text(
            f"paths = {json.dumps([values['model.name'], str(tmp_path)])}\n"
            f"audit-log = '{site / 'state' / 'audit.jsonl'}'\nagreement = 'No. 7, 2026'\n"
            "purpose = 'summaries'\nnot-after = 2199-12-31\n"
        )
        write_site(site, name, data, policy=site / "policy.toml")
        policy = str(site / "policy.toml")
        nodes[number] = {"name": name, "data-path": str(data), "policy": policy}
    own = values | {"state-path": str(tmp_path / "state"), "min-nodes": 2, "rounds": 2}
    del own["data.path"]
    journal = run_in_process(own, tmp_path / "state", 2, InProcessGrid(own, nodes))
    record = tmp_path / "metrics.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in journal.events))
    folder = tmp_path / "court"
    said = site_command(folder, "audit", "--record", record)
    held_out = len((client_folders / "alpha" / "test.jsonl").read_text().splitlines())
    own_events = [e for e in journal.events if (e["event"], e.get("client")) == ("audit", "court")]
    assert f"equals {len(own_events)} recorded lines" in said and len(own_events) >= 5
    assert "adapters in rounds 1, 2: " in said and f"computed from at least {held_out} rows" in said
    assert "purpose: summaries" in said and "agreement: No. 7, 2026" in said
    rows = [json.loads(line) for line in (client_folders / "alpha" / "train.jsonl").open()]
    asked = tmp_path / "asked.jsonl"
    stranger = {key: f"{value} else" for key, value in rows[1].items()}
    asked.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], stranger)))
    said = site_command(folder, "used", asked)
    assert "asked.jsonl:1: run" in said and "train in rounds 1, 2" in said
    assert "asked.jsonl:2: not used" in said
    ledger = b"".join(f.read_bytes() for f in (folder / "state" / "rows").iterdir())
    assert not any(str(value).encode() in ledger for value in rows[0].values())
    log = folder / "state" / "audit.jsonl"
    log.write_bytes(log.read_bytes().rpartition(b'{"line"')[0])
    said = site_command(folder, "audit", "--record", record, status=1)
    assert "lines were removed, or the log was lost" in said
