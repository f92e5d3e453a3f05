"""The official metrics, on cases worked out by hand."""

import pytest

from finetuning.tasks import metrics
from finetuning.tasks.question import Question
from finetuning.tasks.scoring import majority_class
from finetuning.tasks.tasks import TASKS

YES_NO = ("yes", "no")


def question(*answers, candidates=YES_NO, group=""):
    return Question("here:1", "?", answers, candidates, group)


def test_accuracy():
    questions = [question("yes"), question("no"), question("no"), question("yes")]
    found = metrics.score_accuracy(questions, ["yes", "yes", "no", "yes"])
    assert found == {"accuracy": 0.75}
    assert metrics.score_accuracy([question("Rome", "Oslo")], ["Oslo"]) == {"accuracy": 1.0}


def test_macro_f1_counts_classes_that_are_right_or_predicted():
    questions = [question(*[a]) for a in ("yes", "yes", "no", "no")]
    # yes: P 1/1, R 1/2, F1 2/3; no: P 1/2, R 1/2, F1 1/2; maybe is predicted once: 0.
    found = metrics.score_commitment_bank(questions, ["yes", "no", "no", "maybe"])
    assert found == {"accuracy": 0.5, "f1": pytest.approx((2 / 3 + 1 / 2 + 0) / 3)}
    # "maybe" is neither predicted nor right, so it is not counted.
    found = metrics.score_commitment_bank(questions, ["yes", "yes", "no", "no"])
    assert found == {"accuracy": 1.0, "f1": 1.0}


def test_multirc_counts_all_answers_and_whole_questions():
    groups = ["a", "a", "a", "b", "b", "c"]
    right = ["yes", "no", "yes", "no", "no", "yes"]
    questions = [question(r, group=g) for r, g in zip(right, groups, strict=True)]
    # Of 3 right answers 2 are found, with one that is wrong: F1 = 2·2 / (3 + 3).
    found = metrics.score_multirc(questions, ["yes", "no", "no", "yes", "no", "yes"])
    assert found == {"f1a": pytest.approx(2 / 3), "em": pytest.approx(1 / 3)}
    assert metrics.score_multirc(questions, right) == {"f1a": 1.0, "em": 1.0}
    # If every prediction is no, F1 is 0, and only the question without right answers is complete.
    assert metrics.score_multirc(questions, ["no"] * 6) == {"f1a": 0.0, "em": pytest.approx(1 / 3)}


def test_record_takes_the_best_of_the_right_answers():
    def score(prediction, *answers):
        return metrics.score_record([question(*answers)], [prediction])

    assert score("The Bank of England", "bank of england!") == {"f1": 1.0, "em": 1.0}
    # Against "England": precision 1/3, recall 1; against "Bank of": precision 2/3, recall 1.
    assert score("Bank of England", "England") == {"f1": pytest.approx(0.5), "em": 0.0}
    best = score("Bank of England", "England", "Bank of", "Rome")
    assert best == {"f1": pytest.approx(0.8), "em": 0.0}
    assert score("Rome", "Oslo", "Rome") == {"f1": 1.0, "em": 1.0}
    assert score("Rome Rome", "Rome") == {"f1": pytest.approx(2 / 3), "em": 0.0}
    assert score("", "Rome") == {"f1": 0.0, "em": 0.0}
    assert score("the", "Rome") == {"f1": 0.0, "em": 0.0}
    assert score("Rome") == {"f1": 0.0, "em": 0.0}
    both = metrics.score_record([question("Rome"), question("Oslo", "Paris")], ["Rome", "Bergen"])
    assert both == {"f1": 0.5, "em": 0.5}


def test_a_noun_is_right_or_not():
    nouns = ("Susan", "Joan")
    questions = [
        question("Susan", candidates=nouns),
        question(candidates=nouns),
        question(candidates=nouns),
        question("Susan", candidates=("Susan",)),
    ]
    found = metrics.score_winograd(questions, ["Susan", "Joan", "Susan", "Susan"])
    assert found == {"accuracy": 0.75}


def test_generated_texts_have_the_metrics_of_their_paper():
    questions = [question("the court holds", candidates=()), question("的士", candidates=())]
    for name, names in (
        ("xsum", ["rouge1", "rouge2", "rougeL"]),
        ("huatuo", ["bleu4", "rouge1", "rouge2", "rougeL"]),
        ("court", ["rouge1", "rouge2", "rougeL", "bleu4", "bleu_n"]),
    ):
        found = TASKS[name].metrics(questions, ["the court holds", ""])
        assert sorted(found) == sorted(names)
        assert found["rouge1"] == pytest.approx(0.5)
        # Tasks with generated answers have no classes.
        assert majority_class(TASKS[name], questions) == {}


def test_the_majority_class():
    maybe = ("yes", "no", "maybe")
    questions = [question(a, candidates=maybe) for a in ("no", "yes", "no", "maybe")]
    assert majority_class(TASKS["cb"], questions)["accuracy"] == 0.5
    # Of two equally frequent classes, the first is used.
    questions = [question(a) for a in ("no", "yes")]
    assert majority_class(TASKS["rte"], questions) == {"accuracy": 0.5}
    choices = [question("b", candidates=("a", "b")), question("d", candidates=("c", "d"))]
    assert majority_class(TASKS["copa"], choices) == {"accuracy": 1.0}
    nouns = [question(candidates=("a",)), question("b", candidates=("b",)), question()]
    assert majority_class(TASKS["wsc"], nouns) == {"accuracy": pytest.approx(2 / 3)}
    answers = [question("no", group="a"), question("yes", group="a"), question("no", group="b")]
    assert majority_class(TASKS["multirc"], answers) == {"f1a": 0.0, "em": 0.5}
    assert majority_class(TASKS["record"], questions) == {}
