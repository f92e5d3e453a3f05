"""A client's texts can't end a run, forge a line of its records, or break its report."""

import pytest

from server_app.report import write_report
from server_app.results import Results
from strategies.messages import LARGEST_METRIC
from strategies.run_config import parse_run_config
from strategies.run_folder import read_events

WORDS = "\ud800\x1b[2J\n\u202e" + "x" * 10**6


@pytest.fixture
def results(tmp_path, values):
    config = parse_run_config(values)
    made = Results(tmp_path, config, base="tiny", peft_config=None)
    made.describe({})
    yield made
    made.close()


def test_texts_are_escaped_and_cut(results):
    left_out = [{"client": WORDS, "reason": WORDS}]
    results.record({"event": "round", "round": 1, "participants": [], "left_out": left_out})
    results.record({"event": "elsewhere", WORDS: WORDS})
    write_report(results.directory)
    written, other = read_events(results.directory / "metrics.jsonl")
    for text in (*written["left_out"][0].values(), *(other.keys() - {"event"}), *other.values()):
        assert text == "elsewhere" or text.startswith(r"\ud800\x1b[2J\n\u202exx")
        assert text.isprintable() and len(text) <= 1000


def test_the_largest_numbers_that_are_accepted_can_be_plotted(results):
    for number, value in enumerate((-LARGEST_METRIC, LARGEST_METRIC, 1.0), 1):
        event = {"round": number, "client": "court", "loss": value, "perplexity": value}
        results.record({**event, "event": "train"})
        results.record({**event, "event": "evaluate", "model": "global"})
    assert "Held-out loss of court" in write_report(results.directory).read_text()
