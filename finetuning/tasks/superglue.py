"""SuperGLUE's eight tasks as cloze questions (FL-GLM appendix B, table 7).

Rows have the official JSON Lines format or, except those of MultiRC and ReCoRD, the layout of the
Hugging Face Hub. If the table's blank is in mid-sentence, the answer is moved to the end, because a
causal model cannot use the text after the blank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finetuning.data.formats import DataError
from finetuning.tasks.question import Question, as_object, label_of, list_of, number_of, text_of

_YES_NO = ("yes", "no")
_TRUE_FALSE = {False: "no", True: "yes"}


def boolq(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of BoolQ."""
    passage, question = text_of(row, "passage"), text_of(row, "question").rstrip("?")
    prompt = f"{passage} Question: {question}? Answer:"
    return [Question(origin, prompt, (label_of(row, _TRUE_FALSE),), _YES_NO)]


def cb(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of CommitmentBank."""
    labels = {"entailment": "yes", "contradiction": "no", "neutral": "maybe"}
    return _entailment(origin, row, labels)


def rte(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of RTE."""
    return _entailment(origin, row, {"entailment": "yes", "not_entailment": "no"})


def _entailment(origin: str, row: Mapping[str, Any], labels: Mapping[str, str]) -> list[Question]:
    prompt = f'"{text_of(row, "premise")}" "{text_of(row, "hypothesis")}"?'
    return [Question(origin, prompt, (label_of(row, labels),), tuple(labels.values()))]


def copa(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of COPA; "because" asks for a cause, "so" for an effect."""
    choices = tuple(text_of(row, key).rstrip(".") for key in ("choice1", "choice2"))
    words = {"cause": "because", "effect": "so"}
    if row.get("question") not in words:
        raise DataError("needs 'cause' or 'effect' in 'question'")
    premise = text_of(row, "premise").rstrip(".")
    prompt = f'"{choices[0]}" or "{choices[1]}"? {premise}, {words[row["question"]]}'
    right = label_of(row, dict(enumerate(choices)))
    return [Question(origin, prompt, (right,), choices)]


def wic(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of WiC."""
    first, second, word = (text_of(row, key) for key in ("sentence1", "sentence2", "word"))
    prompt = f'"{first}" / "{second}" Similar sense of "{word}"?'
    return [Question(origin, prompt, (label_of(row, _TRUE_FALSE),), _YES_NO)]


def wsc(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of WSC; the row's noun, right or wrong, is the first candidate."""
    target = as_object(row.get("target", row), "'target'")  # part of the row on the Hub
    noun, pronoun = text_of(target, "span1_text"), text_of(target, "span2_text")
    text, words = text_of(row, "text"), text_of(row, "text").split()
    first = number_of(target, "span2_index")
    last = first + len(pronoun.split()) - 1
    if last >= len(words):
        raise DataError("'span2_index' is not within 'text'")
    # The pronoun is marked, because it can occur twice in the text.
    words[first] = f"*{words[first]}"
    words[last] = f"{words[last]}*"
    prompt = f"{' '.join(words)} The pronoun '*{pronoun}*' refers to"
    right = (noun,) if label_of(row, _TRUE_FALSE) == "yes" else ()
    return [Question(origin, prompt, right, candidates=(noun,), group=text)]


def with_other_nouns(questions: list[Question]) -> list[Question]:
    """Add the nouns of the other questions on the same text to each WSC question's candidates."""
    nouns: dict[str, dict[str, str]] = {}
    for question in questions:
        (noun,) = question.candidates
        nouns.setdefault(question.group, {}).setdefault(noun.lower(), noun)
    completed = []
    for question in questions:
        (noun,) = question.candidates
        others = [n for key, n in nouns[question.group].items() if key != noun.lower()]
        completed.append(replace(question, candidates=(noun, *others)))
    return completed


def multirc(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of MultiRC: a passage, with one question per answer option."""
    passage = as_object(row.get("passage"), "'passage'")
    text = text_of(passage, "text")
    questions = []
    for number, asked in enumerate(list_of(passage, "questions")):
        question = text_of(asked, "question")
        for answer in list_of(asked, "answers"):
            if answer.get("text") == "":  # as in three options of the published training set
                continue
            prompt = f"{text} Question: {question} Is it {text_of(answer, 'text')}?"
            right = (label_of(answer, {0: "no", 1: "yes"}),)
            group = f"{origin} {number}"
            questions.append(Question(origin, prompt, right, _YES_NO, group))
    if not questions:
        raise DataError("has no answer that is text")
    return questions


def record(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of ReCoRD: a passage, its entities, and sentences with a blank."""
    passage = as_object(row.get("passage"), "'passage'")
    text = passage.get("text")
    if not isinstance(text, str):
        raise DataError("needs text in 'text' of 'passage'")
    spans = [(number_of(e, "start"), number_of(e, "end")) for e in list_of(passage, "entities")]
    # ``end`` is the index of the entity's last character.
    entities = tuple(dict.fromkeys(text[start : end + 1].strip() for start, end in spans))
    if not all(entities):
        raise DataError("an entity of 'passage' is not within its 'text'")
    shown = text.replace("\n@highlight\n", "\n- ").strip()
    questions = []
    for asked in list_of(row, "qas"):
        query = text_of(asked, "query")
        if "@placeholder" not in query:
            raise DataError("a 'query' has no @placeholder")
        prompt = f"{shown}\n{query.replace('@placeholder', '___')}\nThe blank is"
        answers = dict.fromkeys(text_of(answer, "text") for answer in list_of(asked, "answers"))
        questions.append(Question(origin, prompt, tuple(answers), entities))
    return questions
