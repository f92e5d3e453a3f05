"""Each task's rows become the prompts of FL-GLM's table 7, and rows to train on."""

import copy
import csv
from typing import get_args

import pytest
from datasets import Dataset

from finetuning.data.files import find_part
from finetuning.data.formats import DataError
from finetuning.settings import DataSettings
from finetuning.tasks.reading import read_questions, read_task_rows
from finetuning.tasks.tasks import TASKS
from tests.finetuning.tasks.conftest import ROWS

PROMPTS = {
    "boolq": ("It is. Question: is it a tax? Answer:", ("yes", "no"), ("yes",)),
    "cb": ('"He left." "he stayed"?', ("yes", "no", "maybe"), ("maybe",)),
    "rte": ('"He left." "he stayed"?', ("yes", "no"), ("no",)),
    "copa": (
        '"He ran" or "He sang"? It rained, because',
        ("He ran", "He sang"),
        ("He sang",),
    ),
    "wic": ('"A bank." / "The bank." Similar sense of "bank"?', ("yes", "no"), ("no",)),
    "wsc": (
        "Joan thanked Susan because *she* had helped her . The pronoun '*she*' refers to",
        ("Susan",),
        ("Susan",),
    ),
    "record": (
        "Ada met Bo in Rome.\n- Bo Lee won\nThe winner is ___.\nThe blank is",
        ("Ada", "Bo", "Rome", "Bo Lee"),
        ("Bo", "Bo Lee"),
    ),
    "cnn-dailymail": (
        "Summarize this article in a few sentences:\nA long story.",
        (),
        ("A story.",),
    ),
    "xsum": ("Summarize this article in one sentence:\nA long story.", (), ("A story.",)),
    "huatuo": ("头痛怎么办？", (), ("多休息。",)),
    "court": ("归纳\n事实", (), ("本院认为",)),
    "consultation": ("回答\n问题", (), ("你好",)),
    "reasoning": ("推理\n题", (), ("答案",)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_row_becomes_a_question(name, write):
    (question,) = read_questions(write(ROWS[name]), TASKS[name])
    assert (question.prompt, question.candidates, question.answers) == PROMPTS[name]
    (row,) = read_task_rows(write(ROWS[name]), DataSettings(task=name))
    asked, answered = row.messages
    assert (asked["role"], asked["content"]) == ("user", PROMPTS[name][0])
    assert (answered["role"], answered["content"]) == ("assistant", PROMPTS[name][2][0])
    assert row.fields == ROWS[name] and row.label == answered["content"]


@pytest.mark.parametrize(
    ("name", "label", "answer"),
    [
        ("copa", "0", "He ran"),
        ("boolq", "TRUE", "yes"),
        ("wic", " false ", "no"),
        ("cb", "Neutral", "maybe"),
    ],
)
def test_labels_of_a_table_are_text(name, label, answer, tmp_path):
    file = tmp_path / "val.csv"
    row = {key: cell for key, cell in ROWS[name].items() if isinstance(cell, str)}
    row["label"] = label
    with file.open("w", newline="") as content:
        csv.writer(content).writerows([row, row.values()])
    (question,) = read_questions(file, TASKS[name])
    assert question.answers == (answer,)


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("boolq", {"label": 0}, "no"),
        ("cb", {"label": 1}, "no"),
        ("rte", {"label": 0}, "yes"),
        ("copa", {"label": 0}, "He ran"),
        ("wic", {"label": 1}, "yes"),
        ("wsc", {"label": 1, "span2_index": 4, "span1_text": "Ada", "span2_text": "she"}, "Ada"),
    ],
)
def test_rows_of_the_hub_have_numbers_as_labels(name, row, answer, tmp_path):
    rows = [{key: value for key, value in ROWS[name].items() if key != "target"} | row]
    Dataset.from_list(rows).to_parquet(tmp_path / "validation-00000-of-00001.parquet")
    (question,) = read_questions(find_part(tmp_path, TASKS[name].held_out), TASKS[name])
    assert question.answers == (answer,)


def test_a_passage_of_multirc_has_questions_and_answers(write):
    row = copy.deepcopy(ROWS["multirc"])
    answers = row["passage"]["questions"][0]["answers"]
    answers.append(answers[0] | {"text": ""})  # as in the published training set
    questions = read_questions(write(row), TASKS["multirc"])
    assert [question.prompt for question in questions] == [
        "A ball is thrown. Question: What is thrown? Is it A ball?",
        "A ball is thrown. Question: What is thrown? Is it A stone?",
        "A ball is thrown. Question: Why? Is it No reason?",
    ]
    assert [question.answers for question in questions] == [("yes",), ("no",), ("no",)]
    assert len({question.origin for question in questions}) == 1
    groups = [question.group for question in questions]
    assert groups[0] == groups[1] != groups[2]
    rows = read_task_rows(write(ROWS["multirc"]), DataSettings(task="multirc"))
    assert [row.messages[1]["content"] for row in rows] == ["yes", "no", "no"]


def test_nouns_about_the_same_text_are_candidates(write):
    rows = [copy.deepcopy(ROWS["wsc"]) for _ in range(4)]
    rows[1]["target"]["span1_text"], rows[1]["label"] = "Joan", False
    rows[2]["target"] |= {"span1_text": "susan", "span2_text": "helped her", "span2_index": 6}
    rows[3]["text"] = "Only Susan saw that she was late"
    questions = read_questions(write(*rows), TASKS["wsc"])
    assert [question.candidates for question in questions] == [
        ("Susan", "Joan"),
        ("Joan", "Susan"),
        ("susan", "Joan"),
        ("Susan",),
    ]
    assert "she had *helped her* . The pronoun '*helped her*'" in questions[2].prompt
    # Questions with a wrong noun are not trained on.
    taught = read_task_rows(write(*rows), DataSettings(task="wsc"))
    assert [row.messages[1]["content"] for row in taught] == ["Susan", "susan", "Susan"]


def without(name, *path):
    row = copy.deepcopy(ROWS[name])
    inner = row
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return row


_ASKED = {"question": "Who?", "answers": [{"text": "", "label": 1}]}
EMPTY = {"passage": {"text": "The court.", "questions": [_ASKED]}}


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("boolq", ["a"], "a row must be an object, found list"),
        ("boolq", without("boolq", "label"), "has no 'label' .SuperGLUE's test parts"),
        ("boolq", ROWS["boolq"] | {"label": -1}, "has no 'label' .SuperGLUE's test parts"),
        ("boolq", ROWS["boolq"] | {"label": 2}, "'label' must be False or True"),
        ("boolq", ROWS["boolq"] | {"passage": " "}, "needs text in 'passage'"),
        (
            "boolq",
            ROWS["boolq"] | {"passage": "\ud83d"},
            "'passage' has a lone surrogate at character 1",
        ),
        ("cb", ROWS["cb"] | {"label": 3}, "'entailment' or 'contradiction' or 'neutral'"),
        ("copa", ROWS["copa"] | {"label": 2}, "'label' must be 0 or 1"),
        ("copa", ROWS["copa"] | {"label": True}, "'label' must be 0 or 1"),
        ("copa", ROWS["copa"] | {"question": "why"}, "'cause' or 'effect'"),
        ("wsc", ROWS["wsc"] | {"target": 1}, "'target' must be an object, found int"),
        ("wsc", without("wsc", "target", "span2_index"), "whole number in 'span2_index'"),
        ("wsc", ROWS["wsc"] | {"text": "she"}, "'span2_index' is not within 'text'"),
        ("multirc", without("multirc", "passage", "questions"), "needs a list in 'questions'"),
        ("multirc", EMPTY, "has no answer that is text"),
        ("record", without("record", "passage", "entities"), "needs a list in 'entities'"),
        ("record", ROWS["record"] | {"qas": [3]}, "each of 'qas' must be an object"),
        ("xsum", without("xsum", "summary"), "needs text in 'summary'"),
        ("court", without("court", "output"), "has no answer"),
    ],
)
def test_malformed_rows_are_named(write, name, row, reason):
    file = write(ROWS[name], row)
    for read in (
        lambda: read_questions(file, TASKS[name]),
        lambda: read_task_rows(file, DataSettings(task=name)),
    ):
        with pytest.raises(DataError, match=f"(?s)1 of 2 rows.*{file}:2: .*{reason}"):
            read()
    assert len(read_task_rows(file, DataSettings(task=name, skip_bad_rows=True))) in {1, 3}


def test_settings_know_every_task():
    names = get_args(DataSettings.model_fields["task"].annotation)
    assert names == ("", *TASKS)
