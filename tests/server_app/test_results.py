"""A client's texts can't end a run, forge a line of its records, or break its report."""

import json

import pytest

from federation.messages import LARGEST_METRIC
from federation.run_config import parse_run_config
from federation.run_folder import read_events
from finetuning.files import write_json
from server_app.checkpoint import RunCheckpoint
from server_app.report import write_report
from server_app.results import Results
from strategies.journal import Progress

WORDS = "\ud800\x1b[2J\n\u202e" + "x" * 10**6


@pytest.fixture
def results(tmp_path, values):
    config = parse_run_config(values)
    made = Results(tmp_path, config, base=tmp_path, peft_config=None)
    made.describe({})
    yield made
    made.close()


def test_all_versions_with_which_a_run_was_computed_are_listed(results):
    file = results.directory / "versions.json"
    versions = json.loads(file.read_text())
    write_json(file, versions | {"torch": "2.12.0", "apex": "0.1"})
    for _ in range(2):
        results.describe({})
    expected = {"torch": f"2.12.0, {versions['torch']}", "apex": "0.1"}
    assert json.loads(file.read_text()) == versions | expected


def test_texts_are_escaped_and_cut(results):
    left_out = [{"client": WORDS, "reason": WORDS}]
    results.record({"event": "round", "round": 1, "participants": [], "left_out": left_out})
    results.record({"event": "elsewhere", WORDS: WORDS})
    write_report(results.directory)
    written, other = read_events(results.directory / "metrics.jsonl")
    for text in (*written["left_out"][0].values(), *(other.keys() - {"event"}), *other.values()):
        assert text == "elsewhere" or text.startswith(r"\ud800\x1b[2J\n\u202exx")
        assert text.isprintable() and len(text) <= 1000


@pytest.mark.parametrize("length", [0, 10, 40])
def test_a_run_is_resumed_though_its_metrics_have_lost_their_end(results, length):
    """This can happen after a power failure, or if a backup copied the metrics first."""
    for number in (1, 2):
        results.record({"event": "round", "round": number})
    file = results.directory / "metrics.jsonl"
    size, line = file.stat().st_size, len(file.read_bytes().splitlines(keepends=True)[0])
    with file.open("r+b") as metrics:
        metrics.truncate(length)
    results.rewind_to(RunCheckpoint(Progress("run", 2), {}, {}, {}, metrics_bytes=size))
    results.record({"event": "round", "round": 3})
    write_report(results.directory)
    kept = [1] if length >= line else []
    assert [event["round"] for event in read_events(file)] == [*kept, 3]


def test_the_largest_numbers_that_are_accepted_can_be_plotted(results):
    for number, value in enumerate((-LARGEST_METRIC, LARGEST_METRIC, 1.0), 1):
        event = {"round": number, "client": "court", "loss": value, "perplexity": value}
        results.record({**event, "event": "train"})
        results.record({**event, "event": "evaluate", "model": "global"})
    assert "Held-out loss of court" in write_report(results.directory).read_text()
