"""Sheets of a small study, empty and filled in by annotators."""

import csv
import io
import json

import pytest

from chambers.sheet.blinding import read_sheet_key
from tests.chambers.conftest import execute

MODELS = ("FedJudge-Base", "CL-Client2", "FedJudge-CL")
QUESTIONS = [
    "=cmd|' /C calc'!A0",
    "May the landlord\nchange the lock?",
    "合同有效吗？",
    "<script>alert(1)</script>",
    *(f"question {n}" for n in range(8)),
]


def write_answers(folder, model, questions=QUESTIONS, **more):
    file = folder / f"{model}.jsonl"
    rows = [
        {"question": q, "answer": f"{'+@-='[i % 4]}answer {i} {len(model)}", "reference": f"r{i}"}
        for i, q in enumerate(questions)
    ]
    file.write_text("".join(json.dumps(row | more) + "\n" for row in rows))
    return f"{model}={file}"


@pytest.fixture
def study(tmp_path, capsys):
    """Return a function that makes sheets for all models, and returns their folder."""

    def make(name="study", *words):
        answers = [write_answers(tmp_path, model) for model in MODELS]
        execute(capsys, "sheet", "make", *answers, "--output", tmp_path / name, *words)
        return tmp_path / name

    return make


def read_table(folder, annotator=1):
    file = folder / "sheets" / f"annotator-{annotator}.csv"
    return list(csv.DictReader(io.StringIO(file.read_text("utf-8-sig"), newline="")))


def fill(folder, score, annotator=1):
    """Write a filled sheet as the page saves it; ``score(key_row, criterion)`` returns a score."""
    key = read_sheet_key(folder / "key.json")
    lines = ["id,usefulness,fluency"]
    for row in read_table(folder, annotator):
        own = key.rows[row["id"]]
        lines.append(f"{row['id']},{score(own, 'usefulness')},{score(own, 'fluency')}")
    file = folder / f"filled-{annotator}.csv"
    file.write_text("\r\n".join(lines) + "\r\n")
    return file
