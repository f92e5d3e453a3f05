"""Generated rows of the papers' tasks, in their published formats."""

import json
import random
from pathlib import Path

from tests.conftest import WORDS


def write_tasks(folder: Path, train: int = 24, held_out: int = 32) -> Path:
    """Write a few rows of the tasks of ``bench.paper``'s small size; return the folder."""
    for number, (path, row) in enumerate(_ROWS.items()):
        source = random.Random(number)
        for name, count in (("train", train), ("val", held_out)):
            lines = [json.dumps(row(source, index)) for index in range(count)]
            file = folder / path / f"{name}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"{line}\n" for line in lines))
    return folder


def _words(source: random.Random, most: int = 8) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(3, most)))


def _entailment(*labels: str):
    def row(source, index):
        texts = {"premise": _words(source), "hypothesis": _words(source, 4)}
        return texts | {"label": labels[index % len(labels)]}

    return row


def _boolq(source, index):
    texts = {"passage": _words(source, 20), "question": _words(source, 5)}
    return texts | {"label": index % 2 == 0}


def _copa(source, index):
    choices = {"choice1": _words(source, 4), "choice2": _words(source, 4)}
    return {"premise": _words(source), "question": "effect", "label": index % 2} | choices


def _record(source, index):
    text = _words(source, 12)
    first = text.split()[0]
    entities = [{"start": 0, "end": len(first) - 1}]
    asked = {"query": f"{_words(source)} @placeholder", "answers": [{"text": first}]}
    return {"passage": {"text": text, "entities": entities}, "qas": [asked]}


def _multirc(source, index):
    questions = [
        {
            "question": f"{_words(source, 4)}?",
            "answers": [{"text": _words(source, 4), "label": label} for label in (index % 2, 1)],
        }
        for _ in range(2)
    ]
    return {"passage": {"text": _words(source, 12), "questions": questions}}


_ROWS = {
    "superglue/BoolQ": _boolq,
    "superglue/CB": _entailment("entailment", "contradiction", "neutral"),
    "superglue/COPA": _copa,
    "superglue/MultiRC": _multirc,
    "superglue/RTE": _entailment("entailment", "not_entailment"),
    "superglue/ReCoRD": _record,
}
