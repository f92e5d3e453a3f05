"""The layouts of other tools: which columns become which turns, and what is refused."""

import json

import pytest

from finetuning.data.formats import DataError
from finetuning.data.layouts import parse_row
from finetuning.data.prompts import parse_prompt
from finetuning.settings import DataSettings

Q, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
EARLIER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("value", "turns"),
    [
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            [Q, A],
        ),
        ({"conversations": [SYSTEM | {"role": "Developer"}, Q, A]}, [SYSTEM, Q, A]),
        ({"messages": [Q, A], "system_prompt": "S"}, [SYSTEM, Q, A]),
        (
            {"messages": '[{"role": "user", "content": "Q"}, {"role": "model", "content": "A"}]'},
            [Q, A],
        ),
        (
            {"messages": [Q | {"content": [{"type": "text", "text": "Q", "image": None}]}, A]},
            [Q, A],
        ),
        ({"messages": [Q, A | {"tool_calls": None, "refusal": ""}], "tools": []}, [Q, A]),
        ({"prompt": "Q", "completion": "A"}, [Q, A]),
        ({"Prompt": "Q", " response ": "A"}, [Q, A]),
        ({"prompt": [*EARLIER, Q], "completion": [A]}, [*EARLIER, Q, A]),
        ({"prompt": [Q], "completion": "A"}, [Q, A]),
        ({"question": "Q", "answer": "A", "system": "S"}, [SYSTEM, Q, A]),
        ({"query": "Q", "response": "A", "history": [["q", "a"]]}, [*EARLIER, Q, A]),
        ({"input": "Q", "output": "A", "history": '[["q", "a"]]'}, [*EARLIER, Q, A]),
        (
            {"input": "Q", "output": "A", "system": "S", "history": EARLIER},
            [SYSTEM, *EARLIER, Q, A],
        ),
        (
            {"instruction": "Q", "context": "C", "response": "A", "category": "open"},
            [Q | {"content": "Q\nC"}, A],
        ),
        ({"prompt": "Q", "prompt_id": "1", "messages": [Q, A]}, [Q, A]),  # a copy
    ],
)
def test_layouts(value, turns):
    assert list(parse_row("", value).messages) == turns
    prompt = [*turns[:-1], A | {"content": "x"}]
    assert list(parse_prompt(value)) == prompt
    bare = {
        k: v
        for k, v in value.items()
        if k.strip() not in ("completion", "response", "output", "answer")
    }
    assert list(parse_prompt(bare)) == prompt


PAIR = {"instruction": "Q", "output": "A"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
            'columns to "prompt=prompt,completion=chosen"',
        ),
        ({"text": "secret"}, "has only 'text', without an answer to learn from"),
        (PAIR | {"response": "B"}, "'response' can't be used beside 'instruction', 'output'"),
        (PAIR | {"question": "B"}, "'question' can't be used beside"),
        (PAIR | {"tools": "[{}]"}, "'tools' can't be used beside"),
        (PAIR | {"passage": "long"}, "'passage' can't be used beside"),
        (PAIR | {"weight": 0}, "'weight' can't be used beside"),
        (PAIR | {"history": [["q"]]}, "turn 1 of 'history' needs the role"),
        (PAIR | {"Output": "A"}, "two columns of the same name: 'output'"),
        ({"messages": [Q, A], "system": "S", "context": "C"}, "'context' can't be used beside"),
        ({"messages": [SYSTEM, Q, A], "system": "other"}, "'system' can't be used beside"),
        ({"messages": [Q, A | {"tool_calls": [{}]}]}, "turn 2 of 'messages' has a key that can't"),
        ({"messages": [Q, A | {"reasoning_content": "B"}]}, "remove it: 'reasoning_content'"),
        ({"messages": [Q, A | {"value": "B"}]}, "remove it: 'value'"),
        ({"messages": [Q | {"content": [{"type": "image", "image": "x"}]}, A]}, "not text"),
        ({"messages": [Q | {"content": ["x"]}, A]}, "not text"),
        ({"messages": [Q, A | {"content": [{"text": "A", "train": False}]}]}, "not only text"),
        ({"messages": [Q, A | {"weight": 0.5}]}, "'weight' must be 0 or 1"),
        ({"messages": [Q, A | {"train": "false"}]}, "'train' true or false"),
        ({"messages": [Q, A | {"train": False}]}, "all have weight 0 or train false"),
        ({"messages": "['Q']"}, "not JSON"),
        ({"prompt": "Q", "completion": "A", "label": False}, "has 'label', which says whether"),
    ],
)
def test_what_would_be_lost_is_refused(value, reason):
    with pytest.raises(DataError) as error:
        parse_row("", value)
    assert reason in str(error.value)


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": None}])
def test_answers_that_are_not_learnt_are_context(key):
    asked = [*EARLIER[:1], EARLIER[1] | key, Q, A | {"weight": 1}]
    assert parse_row("", {"messages": asked}).context == {1}
    # Nothing is learnt from the last turns.
    row = parse_row("", {"messages": [Q, A, *EARLIER[:1], EARLIER[1] | key]})
    assert (list(row.messages), row.context) == ([Q, A], frozenset())
    assert parse_row("", {"prompt": [*EARLIER, Q], "completion": [A]}).context == {1}


def test_turns_may_be_json_text_as_in_csv():
    value = {"prompt": json.dumps([SYSTEM, Q]), "completion": json.dumps([A])}
    assert list(parse_row("", value).messages) == [SYSTEM, Q, A]
    for text in ('[{"name": "x"}]', "[x", "[]"):
        (asked, answered) = parse_row("", {"prompt": text, "completion": text}).messages
        assert asked["content"] == answered["content"] == text


def test_what_is_not_used_is_told():
    turns = [Q | {"name": "Ann", "id": None}, A]
    row = parse_row("", {"messages": turns, "court": "north", "Quelle": "web", "system": ""})
    assert row.unused == ("court", "Quelle", "name of turns")
    assert row.layout == "messages"
    assert parse_row("", PAIR | {"input": "B", "id": 0}).layout == "instruction, input, output"


def test_columns_of_other_names():
    settings = DataSettings(columns="prompt = frage, completion=antwort ,system=rolle")
    value = {"frage": "Q", "antwort": "A", "rolle": "S", "prompt": "other", "text": "more"}
    row = parse_row("", value, settings.names_of_columns)
    assert list(row.messages) == [SYSTEM, Q, A]
    assert row.unused == ("prompt", "text")
    with pytest.raises(DataError, match=r"has no question .*: found 'text'"):
        parse_row("", {"text": "Q"}, settings.names_of_columns)


@pytest.mark.parametrize(
    "columns", ["frage", "frage=prompt", "prompt=", "prompt=a,prompt=b", "prompt=a,output=a"]
)
def test_columns_that_are_not_pairs_are_refused(columns):
    with pytest.raises(ValueError, match=r"data.columns = .* must have different names of columns"):
        DataSettings(columns=columns)
