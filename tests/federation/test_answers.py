"""Answers as text: when clients send them, and which of them are refused."""

import json

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from chambers.in_process import InProcessGrid
from federation.messages import ANSWERS, Answer, answers_of, answers_problem, answers_record
from federation.run_config import parse_run_config
from tests.in_process import run_in_process

GENERATING = {
    "evaluate.generate": True,
    "evaluate.generate-examples": 3,
    "evaluate.max-new-tokens": 4,
}


def test_they_travel_before_the_first_round_and_after_the_last(values, client_folders, tmp_path):
    values = values | GENERATING | {"rounds": 2, "train.local-steps": 1}
    assert not [e for e in events(values, tmp_path / "none") if e["event"] == "answers"]
    shown = [
        event
        for event in events(values | {"evaluate.show-answers": 2}, tmp_path / "some")
        if event["event"] == "answers"
    ]
    found = {(e["client"], e["round"], e["model"]): e["answers"] for e in shown}
    asked = ((0, "base"), (2, "global"), (2, "personalised"))
    assert len(shown) == len(found) == 9
    for client in ("alpha", "beta", "gamma"):
        lines = (client_folders / client / "test.jsonl").read_text().splitlines()[:2]
        rows = [json.loads(line) for line in lines]
        for round_number, model in asked:
            answers = found[client, round_number, model]
            assert [a["reference"] for a in answers] == [row["output"] for row in rows]
            assert [a["question"] for a in answers] == [f"Repeat {row['input']}" for row in rows]
            assert all(isinstance(a["text"], str) for a in answers)


def events(values, folder):
    return run_in_process(values, folder, 3).events


def test_only_answers_that_are_generated_are_shown():
    config = parse_run_config(GENERATING | {"evaluate.show-answers": 5})
    assert config.evaluate.shown == 3
    config = parse_run_config(GENERATING | {"evaluate.show-answers": 5, "evaluate.generate": False})
    assert config.evaluate.shown == 0


def reply(record) -> Message:
    InProcessGrid({}, {})  # Flower needs a run before a message can be created
    return Message(RecordDict({} if record is None else {ANSWERS: record}), 1, "evaluate")


GOOD = {"model": ["base"], "question": ["q"], "reference": ["r"], "text": ["t"]}


@pytest.mark.parametrize(
    ("record", "most", "reason"),
    [
        (None, 0, None),
        (GOOD, 1, None),
        (GOOD, 0, "not requested"),
        ({}, 1, "are malformed"),
        (GOOD | {"more": ["x"]}, 1, "are malformed"),
        (GOOD | {"text": []}, 1, "are malformed"),
        (GOOD | {"text": [1]}, 1, "are malformed"),
        (GOOD | {"text": "t"}, 1, "are malformed"),
        (GOOD | {"model": ["other"]}, 1, "at most 1 answers from each of the models base"),
        ({key: value * 2 for key, value in GOOD.items()}, 1, "at most 1 answers from each"),
    ],
)
def test_others_are_refused(record, most, reason):
    problem = answers_problem(reply(None if record is None else ConfigRecord(record)), most)
    assert (problem is None) if reason is None else reason in problem


def test_texts_are_single_lines_of_bounded_length():
    text = "one\n two\x1b[2J" + "x" * 5000
    sent = reply(answers_record([Answer("base", text, text, text)]))
    raw = reply(ConfigRecord({key: [text] for key in GOOD} | {"model": ["base"]}))
    for (answer,) in (answers_of(sent), answers_of(raw)):
        assert answer.text == answer.question == answer.reference
        assert answer.text.startswith(r"one two\x1b[2Jxx") and len(answer.text) == 1000
