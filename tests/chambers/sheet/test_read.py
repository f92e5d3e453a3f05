"""``chambers sheet read``: the table of annotators' scores, from sheets that match the key."""

import csv
import io
import random
import re

import numpy as np
import pytest

from chambers.sheet.blinding import read_sheet_key
from chambers.sheet.results import evaluate_sheets
from tests.chambers.conftest import execute, refused
from tests.chambers.sheet.conftest import QUESTIONS, fill, read_table, write_answers


def test_the_table_has_means_and_their_spread(study, capsys):
    folder = study("study", "--annotators", "2")
    given = {"FedJudge-Base": 2, "CL-Client2": 5, "FedJudge-CL": 4}

    def score(row, criterion):
        extra = row.annotator == 2 and row.model == "FedJudge-Base" and "question" in row.question
        return given[row.model] - (criterion == "fluency") + extra

    files = [fill(folder, score, annotator) for annotator in (1, 2)]
    shown = execute(capsys, "sheet", "read", folder / "key.json", *files)
    # Of 12 questions, 8 have the mean 2.5 and 4 have the mean 2.
    # 2.201 is the quantile of Student's t with 11 degrees of freedom.
    spread = 2.201 * np.std([2.5] * 8 + [2] * 4, ddof=1) / np.sqrt(12)
    assert shown.splitlines()[:5] == [
        "| Model | Usefulness | Fluency |",
        "|---|---|---|",
        f"| FedJudge-Base | 2.33 ± {spread:.2f} | 1.33 ± {spread:.2f} |",
        "| CL-Client2 | 5.00 | 4.00 |",
        "| FedJudge-CL | 4.00 | 3.00 |",
    ]
    assert shown.splitlines()[-1] == "12 questions, 2 of 2 annotators"


def alpha(scores):
    """Return Krippendorff's alpha with the interval metric; ``scores`` is (annotators, answers)."""
    pairs = [(a - b) ** 2 for unit in scores.T for a in unit for b in unit]
    observed = sum(pairs) / (len(scores) - 1) / scores.size
    every = scores.ravel()
    expected = ((every[:, None] - every) ** 2).sum() / scores.size / (scores.size - 1)
    return 1 - observed / expected


def test_agreement_is_the_alpha_of_krippendorff(tmp_path, capsys):
    # Observed: 2 · 1 / 8; expected: 2 · (8 · 85 - 23²) / 56; alpha: 1 - 0.25 / 5.392857.
    assert alpha(np.array([[1, 2, 3, 5], [1, 2, 4, 5]])) == pytest.approx(0.953642, abs=1e-6)
    answers = write_answers(tmp_path, "one", QUESTIONS[4:8])
    folder = tmp_path / "study"
    execute(capsys, "sheet", "make", answers, "--output", folder, "--annotators", "3")
    hand = {1: [1, 2, 3, 5], 2: [1, 2, 4, 5]}

    def score(row, criterion):
        return hand[row.annotator][QUESTIONS[4:8].index(row.question)] if criterion[0] == "u" else 3

    key = read_sheet_key(folder / "key.json")
    files = [fill(folder, score, annotator) for annotator in (1, 2)]
    results = evaluate_sheets(key, files)
    assert results.agreement["usefulness"] == pytest.approx(0.953642, abs=1e-6)
    assert results.agreement["fluency"] is None  # all scores are equal
    assert evaluate_sheets(key, files[:1]).agreement["usefulness"] is None
    draw = np.random.default_rng(0).integers(1, 6, (3, 4))

    def drawn(row, _):
        return draw[row.annotator - 1, QUESTIONS[4:8].index(row.question)]

    results = evaluate_sheets(key, [fill(folder, drawn, annotator) for annotator in (1, 2, 3)])
    assert results.agreement["fluency"] == pytest.approx(alpha(draw))


def test_tables_that_spreadsheets_have_saved_are_read(study):
    """Separators, encodings, decimal places and the order of rows and columns may differ."""
    folder = study()
    rows = read_table(folder)
    random.Random(0).shuffle(rows)
    text = io.StringIO()
    table = csv.writer(text, delimiter=";")
    table.writerow(["Fluency ", "ID", "answer", "usefulness"])
    for row in rows:
        table.writerow(["4,0", row["id"], row["question"] + "；；；", "3.0"])
    file = folder / "filled.csv"
    key = read_sheet_key(folder / "key.json")
    for encoding in ("gb18030", "utf-8-sig"):
        file.write_bytes(text.getvalue().encode(encoding) + b"\r\n;;;\r\n")
        results = evaluate_sheets(key, [file])
        assert {str(means["fluency"]) for means in results.means.values()} == {"4.00"}


def replace(line, old, new):
    def change(lines):
        lines[line] = re.sub(old, new, lines[line])

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: lines.pop(3), r"filled-1\.csv: the row \w+ of question 1 is missing"),
        (replace(4, "^", "x"), r"filled-1\.csv:5: the key has no id 'x\w+'"),
        (replace(4, ",3,", ",6,"), r"filled-1\.csv:5: usefulness is 6, not one of 1 to 5"),
        (replace(4, ",3,", ",2.5,"), r"filled-1\.csv:5: usefulness is 2\.5, not one of 1 to 5"),
        (replace(4, ",3,", ",good,"), r"filled-1\.csv:5: usefulness is 'good', not a number"),
        (replace(4, ",3,3", ",3"), r"filled-1\.csv:5: fluency is empty"),
        (replace(4, ",3,3", ',"3'), r"filled-1\.csv:5 is not CSV"),
        (lambda lines: lines.append(lines[2]), r"filled-1\.csv:38: .* is also on line 3"),
        (replace(0, "fluency", "style"), r"filled-1\.csv:1: expected exactly one column fluency"),
        (lambda lines: lines.clear(), r"filled-1\.csv has no row of the key's sheets"),
    ],
)
def test_a_sheet_that_does_not_fit_its_key_is_refused(study, capsys, change, reason):
    folder = study()
    file = fill(folder, lambda *_: 3)
    lines = file.read_text().splitlines()
    change(lines)
    file.write_text("\n".join(lines))
    assert re.search(reason, refused(capsys, "sheet", "read", folder / "key.json", file))


def test_sheets_of_another_study_or_twice_the_same_are_refused(study, capsys):
    one, other = study("1"), study("2")
    files = [fill(one, lambda *_: 3, annotator) for annotator in (1, 2)]
    reason = refused(capsys, "sheet", "read", other / "key.json", *files)
    assert "the sheet belongs to a different key" in reason
    reason = refused(capsys, "sheet", "read", one / "key.json", files[0], files[0])
    assert "are both sheet 1" in reason
    files[1].write_text(files[0].read_text() + files[1].read_text().partition("\n")[2])
    reason = refused(capsys, "sheet", "read", one / "key.json", files[1])
    assert "mixes rows of the sheets 1, 2" in reason
    reason = refused(capsys, "sheet", "read", files[0], files[0])
    assert reason.endswith(
        "filled-1.csv is not a key from chambers sheet make: Invalid JSON: "
        "expected value at line 1 column 1\n"
    )
