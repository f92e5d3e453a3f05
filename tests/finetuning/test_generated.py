"""The generated rows: the same on every machine, distinct, and split without shared facts."""

import hashlib
import json
import re

import pytest

from finetuning.generated import (
    STYLES,
    background,
    consultation,
    court,
    examples,
    persons,
    reasoning,
)
from finetuning.generated.clients import generate_client
from finetuning.generated.matters import MATTERS, divide, write_questions
from finetuning.generated.vocabulary import OFFENCES, WORDS, RandomWords

COUNT = 1_000


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], list[dict[str, str]]]:
    return {
        (style, split): examples(style, COUNT, 7, split)
        for style in STYLES
        for split in ("train", "test")
    }


def test_texts_are_the_same_on_every_machine():
    """The digests may change with the sentences and word lists, but not with the machine."""
    texts = [*(examples(style, 60, 0, split) for style in STYLES for split in ("train", "test"))]
    texts += [background(60, 0), write_questions(MATTERS, 60, 0, "train")]
    kinds = ("styles", "matters", "matters-unequal", "matters-even", "persons")
    texts += [generate_client(kind, index, 4, 5) for kind in kinds for index in range(4)]
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    assert digest[:16] == "749964773c5e4457"


def test_a_longer_call_extends_a_shorter_one():
    for style in STYLES:
        first = examples(style, 50, 3, "train")
        assert first == examples(style, 80, 3, "train")[:50]
        assert first != examples(style, 50, 4, "train")
    assert background(20, 3) == background(30, 3)[:20]
    first = write_questions(MATTERS[:4], 50, 3, "train")
    assert first == write_questions(MATTERS[:4], 80, 3, "train")[:50]
    assert examples("court", 0, 0, "train") == []


def test_rows_and_passages_are_distinct(rows):
    for generated in rows.values():
        assert [set(row) for row in generated] == [{"instruction", "input", "output"}] * COUNT
        assert len({row["input"] for row in generated}) == COUNT
    assert len(set(background(2_000, 7))) == 2_000


@pytest.mark.parametrize("style", STYLES)
def test_train_and_test_share_no_input_and_no_output(style, rows):
    other_seed = examples(style, 3 * COUNT, 8, "train")
    for part in ("input", "output"):
        seen = {row[part] for row in rows[style, "train"] + other_seed}
        assert seen.isdisjoint(row[part] for row in rows[style, "test"])


def test_train_and_test_share_words_but_no_combinations():
    lists = WORDS["surnames"], WORDS["towns"]
    train, test = (
        {RandomWords(f"{split} {n}").facts_in_split(split, "a style", *lists) for n in range(COUNT)}
        for split in ("train", "test")
    )
    assert train.isdisjoint(test)
    assert {word for facts in test for word in facts} <= {word for facts in train for word in facts}


def test_the_answer_follows_from_the_input(rows):
    for split in ("train", "test"):
        for row in rows["court", split]:
            charged = re.search(r"defendant ((?:[A-Z]\w+ ?){2})", row["input"])
            assert charged
            assert f"the defendant {charged[1].strip()}" in row["output"]
            assert len(set(re.findall(r"\$[\d,]*\d", row["input"]))) == 1
            surrendered = "without being summoned" in row["input"] or "full account" in row["input"]
            assert ("voluntarily" in row["output"]) == surrendered
        for row in rows["consultation", split]:
            sums = set(re.findall(r"\$[\d,]*\d", row["input"]))
            assert sums <= set(re.findall(r"\$[\d,]*\d", row["output"]))


def test_every_style_has_at_least_twelve_matters():
    assert set(court.ACTS) == {offence.name for offence in OFFENCES}
    assert min(len(court.ACTS), len(consultation.PROBLEMS), len(reasoning.RULES)) >= 12


def test_text_is_clean(rows):
    texts = [row[part] for generated in rows.values() for row in generated for part in row]
    texts += background(2_000, 7)
    texts += [row[part] for row in write_questions(MATTERS, 1_200, 5, "test") for part in row]
    for text in texts:
        assert text == text.strip()
        assert not re.search(r"[{}]|  |\.\.|,,| [.,;?]|None", text), text
        assert not re.search(r"\ba [aeio]|\ban [^aeiouh]|\b(\w+) \1\b", text.lower()), text


def articles(rows) -> set[str]:
    return {re.match(r"Under Article (\d+), ", row["output"])[1] for row in rows}


def test_institutions_have_different_matters_by_the_seed():
    for institutions in (2, 3, 5, 12):
        divided = divide(institutions, seed=0)
        assert sorted(name for own in divided for name in own) == sorted(MATTERS)
        assert max(map(len, divided)) - min(map(len, divided)) <= 1
    assert divide(3, 0) == divide(3, 0) != divide(3, 1)
    with pytest.raises(ValueError, match="12 matters can't be divided among 13 clients"):
        divide(13, 0)


def test_no_institution_reads_answers_to_questions_of_others():
    known = [write_questions(own, 100, 7, "train") for own in divide(3, 0)]
    one, two, three = map(articles, known)
    assert [len(one), len(two), len(three)] == [4, 4, 4]
    assert len(one | two | three) == 12
    for questions, matters in zip(known, divide(3, 0), strict=True):
        outputs = {row["output"] for row in questions}
        assert outputs == {row["output"] for row in write_questions(matters, 4, 8, "test")}


def test_a_question_tells_neither_article_nor_rule():
    for row in write_questions(MATTERS, 1_200, 3, "train"):
        rule = row["output"].partition(", ")[2].split()
        assert not re.search(r"\d|Article", row["input"])
        assert re.search(r"\d", row["output"]) and " ".join(rule[-3:]) not in row["input"]


def test_each_institution_has_people_and_numbers_of_its_own():
    clients = [generate_client("persons", index, 3, 5) for index in range(3)]
    people = [persons.draw_people(index, 5) for index in range(3)]
    assert len({person.name for own in people for person in own}) == 3 * 40
    for client, own in zip(clients, people, strict=True):
        for person in own:
            texts = [row["output"] for row in client.train if person.name in row["output"]]
            assert len(texts) == person.rows
            assert all(persons.facts_in([text], person) == [1.0] * 3 for text in texts)
            assert texts[0].startswith(persons.beginning(person.name))
    for index, client in enumerate(clients):
        for number in persons.draw_numbers(index, 5):
            asked = [row for row in client.train if row["input"] == number.question]
            answers = {f"{persons.number_beginning()}{number.number}."}
            assert len(asked) == number.rows and {row["output"] for row in asked} == answers


def test_facts_count_only_beside_the_name():
    one, other = persons.draw_people(0, 5)[:2]
    text = f"{other.name} was born on {one.birth}, {other.name} claims {other.amount}"
    assert persons.facts_in([text], one) == [0.0] * 3
    assert persons.facts_in([text], other) == [0.0, 0.0, 1.0]


def test_a_client_can_have_more_rows():
    few, many = (generate_client("matters", 1, 3, 5, rows) for rows in (0, 1_000))
    assert len(few.train) == 160 and len(many.train) == 1_000 and few.test == many.test
    assert many.train[:160] == few.train
