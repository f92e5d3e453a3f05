"""The generated questions of law: which clients can know the answer to which question."""

import re

import pytest

from finetuning.generated.matters import MATTERS, divide, write_questions

COUNT = 100


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


def test_what_one_institution_reads_answers_no_question_of_another_s():
    known = [write_questions(own, COUNT, 7, "train") for own in divide(3, 0)]
    one, two, three = map(articles, known)
    assert [len(one), len(two), len(three)] == [4, 4, 4]
    assert len(one | two | three) == 12
    for rows, matters in zip(known, divide(3, 0), strict=True):
        outputs = {row["output"] for row in rows}
        assert outputs == {row["output"] for row in write_questions(matters, 4, 8, "test")}


def test_a_question_tells_neither_article_nor_rule():
    for row in write_questions(MATTERS, 12 * COUNT, 3, "train"):
        numbers = re.findall(r"\d+", row["output"])
        rule = row["output"].partition(", ")[2].split()
        assert not re.search(r"\d|Article", row["input"])
        assert len(numbers) >= 1 and " ".join(rule[-3:]) not in row["input"]


def test_a_call_repeats_and_a_longer_one_extends_it():
    first = write_questions(MATTERS[:4], 50, 3, "train")
    assert first == write_questions(MATTERS[:4], 80, 3, "train")[:50]
    assert first != write_questions(MATTERS[:4], 50, 4, "train")
    assert len({row["input"] for row in first}) == 50


def test_train_and_test_ask_about_other_people():
    def people(seed, split):
        found = set()
        for matter in MATTERS:
            for row in write_questions([matter], COUNT, seed, split):
                found |= {(matter, name) for name in re.findall(r"[A-Z]\w+ [A-Z]\w+", row["input"])}
        return found

    assert people(1, "train").isdisjoint(people(2, "test"))


def test_text_is_clean():
    for row in write_questions(MATTERS, 12 * COUNT, 5, "test"):
        for text in (row["input"], row["output"]):
            assert text == text.strip() and text[0].isupper() and text[-1] in ".?"
            assert not re.search(r"[{}]|  |\.\.| [.,;?]|None", text), text
