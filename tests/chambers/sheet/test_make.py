"""``chambers sheet make``: nothing in a sheet reveals which model wrote an answer."""

import json
import re
from html.parser import HTMLParser

import pytest

from chambers.__main__ import main
from chambers.sheet.blinding import read_sheet_key
from tests.chambers.conftest import execute, refused
from tests.chambers.sheet.conftest import MODELS, QUESTIONS, read_table, write_answers


def test_sheets_have_each_answer_once_without_its_model(study):
    folder = study()
    key = read_sheet_key(folder / "key.json")
    assert (folder / "key.json").stat().st_mode & 0o077 == 0
    files = sorted(path.name for path in (folder / "sheets").iterdir())
    assert files == [f"annotator-{n}.{kind}" for n in (1, 2, 3) for kind in ("csv", "html")]
    for file in (folder / "sheets").iterdir():
        text = file.read_text("utf-8-sig")
        assert not any(name in text for name in (*MODELS, "FedJudge", "Client"))
        assert str(key.seed) not in text
    for annotator in (1, 2, 3):
        rows = read_table(folder, annotator)
        found = sorted((key.rows[r["id"]].question, key.rows[r["id"]].model) for r in rows)
        assert found == sorted((q, model) for q in QUESTIONS for model in MODELS)
        for row in rows:
            own = key.rows[row["id"]]
            index = QUESTIONS.index(own.question)
            assert (
                row["answer"].lstrip("'") == f"{'+@-='[index % 4]}answer {index} {len(own.model)}"
            )
            assert row["reference"] == f"r{index}"


def orders(folder, annotator=1):
    """Return the order of questions, and the order of models for each question."""
    key = read_sheet_key(folder / "key.json")
    rows = [key.rows[row["id"]] for row in read_table(folder, annotator)]
    questions = [row.question for row in rows[:: len(MODELS)]]
    return questions, {q: [row.model for row in rows if row.question == q] for q in questions}


def test_orders_differ_by_seed_annotator_and_question(study):
    one, again, other = study("1", "--seed", "1"), study("2", "--seed", "1"), study("3")
    assert orders(one) == orders(again)
    assert orders(one)[0] != orders(other)[0] != QUESTIONS
    assert orders(one)[1] != orders(other)[1]
    assert orders(one, 1)[0] != orders(one, 2)[0]
    assert orders(one, 1)[1] != orders(one, 2)[1]
    assert len({tuple(models) for models in orders(one)[1].values()}) > 3
    ids = [{row["id"] for row in read_table(folder)} for folder in (one, again, other)]
    assert ids[0] == ids[1]
    assert not ids[0] & ids[2]


def test_no_cell_is_a_formula_a_number_or_a_date(study):
    for row in read_table(study()):
        for cell in (row["question"], row["reference"], row["answer"]):
            assert cell[0] not in "=+-@\t\r\n"
        assert re.fullmatch(r"[b-z]{10}", row["id"])


class _Page(HTMLParser):
    """The tags, texts and inputs of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts, self.inputs, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.ids.append(dict(attrs)["data-id"])
        if tag == "input" and dict(attrs)["type"] == "radio":
            self.inputs.append((dict(attrs)["name"], dict(attrs)["value"]))

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_shows_escaped_rows_and_fetches_nothing(study):
    folder = study()
    text = (folder / "sheets" / "annotator-1.html").read_text()
    page = _Page()
    page.feed(text)
    rows = read_table(folder)
    assert page.ids == [row["id"] for row in rows]
    wanted = {
        (f"{i}-{c}", str(n))
        for i in page.ids
        for c in ("usefulness", "fluency")
        for n in range(1, 6)
    }
    assert set(page.inputs) == wanted
    assert {q for q in QUESTIONS if q in page.texts} == set(QUESTIONS)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "default-src 'none'" in text
    assert not any({"src", "href"} & attrs.keys() for _, attrs in page.tags)
    assert "//" not in "".join(page.texts)


def test_what_generate_writes_is_read_and_a_sample_is_drawn(tmp_path, capsys):
    turns = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "parties"}]
    rows = [
        {"instruction": "Decide", "input": "the claim", "output": "upheld", "generated": "denied"},
        {"messages": turns, "generated": "nobody"},
        {"messages": [*turns, {"role": "user", "content": "and why"}], "generated": "because"},
        {"id": 7, "question": "same", "answer": ""},
        {"id": 8, "question": "same", "answer": "x"},
    ]
    file = tmp_path / "generated.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    execute(capsys, "sheet", "make", f"a={file}", "--output", tmp_path / "study")
    found = {(r["question"], r["reference"], r["answer"]) for r in read_table(tmp_path / "study")}
    assert found == {
        ("Decide\nthe claim", "upheld", "denied"),
        ("who", "parties", "nobody"),
        ("user: who\n\nassistant: parties\n\nand why", "", "because"),
        ("same", "", ""),
        ("same", "", "x"),
    }
    words = ("--questions", "2", "--hide-references", "--annotators", "1")
    execute(capsys, "sheet", "make", f"a={file}", "--output", tmp_path / "few", *words)
    few = read_table(tmp_path / "few")
    assert len(few) == 2
    assert {row["reference"] for row in few} == {""}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('{"question": "a"}', r"b\.jsonl:1: has no 'answer'"),
        ('{"question": "a", "answer": 3}', r"b\.jsonl:1: the answer must be text, found int"),
        ('{"question": "a", "answer": "\\ud83d"}', r"b\.jsonl:1: the answer has a lone surrogate"),
        ('{"question": " ", "answer": "x"}', r"b\.jsonl:1: the question is empty"),
        ("[1]", r"b\.jsonl:1: expected an object, found list"),
        ("{", r"b\.jsonl:1: not JSON"),
        ("", r"no rows in .*b\.jsonl"),
        ('{"question": "c", "answer": "x"}', r"b has no answer to the question in .*a\.jsonl:1"),
        ('{"question": "a", "answer": "x"}\n{"question": "c", "answer": "x"}', r"a has no answer"),
        ('{"question": "a", "answer": "x"}\n' * 2, r"b\.jsonl:2 has the same question as"),
        ('{"question": "a", "answer": "x", "reference": "y"}', "has a different reference from"),
    ],
)
def test_answers_that_do_not_belong_together_are_refused(tmp_path, capsys, second, reason):
    first, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text('{"question": "a", "answer": "x"}\n')
    other.write_text(second)
    words = ("sheet", "make", f"a={first}", f"b={other}", "--output", tmp_path / "study")
    assert re.search(reason, refused(capsys, *words))
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("answers.jsonl",), "answers.jsonl: must be MODEL=FILE.jsonl"),
        (("a=x", " a=y"), "a is named twice"),
        (("a=x", "--output", "/dev/null/x"), "/dev/null/x can't be created in /dev/null: not a"),
        (("a=/nowhere",), "/nowhere is not a file"),
        (("a=x", "--annotators", "0"), "'--annotators': 0 is not in the range"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, capsys, words, reason):
    assert reason in refused(capsys, "sheet", "make", "--output", tmp_path / "study", *words)


def test_the_name_of_a_model_in_an_answer_is_pointed_out(tmp_path, capsys):
    answers = write_answers(tmp_path, "answer")
    execute(capsys, "sheet", "make", answers, "--output", tmp_path / "study")
    words = ("--output", tmp_path / "other")
    capsys.readouterr()
    assert main(["sheet", "make", answers, *map(str, words)]) == 0
    assert "answers to 12 questions contain the name answer" in capsys.readouterr().err
