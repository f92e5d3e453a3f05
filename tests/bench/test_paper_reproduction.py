"""``docs/reproduction.md`` is what is recorded, and nothing else."""

import json
import re
from pathlib import Path

import pytest

from bench.paper.artefacts import ARTEFACTS
from bench.paper.cells import LIBRARIES, SheetsCell, described
from bench.paper.fedjudge_cells import cells_of
from bench.paper.legal import ASKED, CLIENTS, COUNTED, METRICS, MODELS
from bench.paper.measuring import settings_of
from bench.paper.report import DOCUMENT, current, read_record, reproduction, write_record
from bench.paper.sizes import read_size
from bench.paper.tables import NOT_RUN
from tests.bench.pictures_equal import assert_same_picture

DOCS = Path(__file__).parents[2] / "docs"
FEDJUDGE = [artefact for artefact in ARTEFACTS if artefact.name.startswith("fedjudge")]


def test_the_document_equals_its_record():
    text, pictures = reproduction(DOCS, ARTEFACTS)
    assert (DOCS / DOCUMENT).read_text(encoding="utf-8") == text
    for name, svg in pictures.items():
        assert_same_picture(svg, (DOCS / name).read_text(encoding="utf-8"))


def record_of(cell, result, seconds=60.0):
    versions = dict.fromkeys(LIBRARIES, "1.0")
    return {
        "cell": described(cell),
        "settings": settings_of(cell, read_size("small")),
        "versions": versions,
        "result": result,
        "seconds": seconds,
    }


def test_results_of_other_weights_or_data_are_not_put_beside_the_rest():
    size, records = read_size("small"), read_record(DOCS, "small")
    (bare,) = (r for r in records if {"task": "rte", "method": "bare"}.items() <= r["cell"].items())
    for key in ("model", "data"):
        foreign = bare | {"settings": bare["settings"] | {key: "of another"}}
        mixed = [foreign if record is bare else record for record in records]
        shown = current(mixed, size, ARTEFACTS)
        assert len(shown) == len(current(records, size, ARTEFACTS)) - 1
        assert foreign not in shown


def legal_records(methods, shift=0.0):
    """Return made-up results, in which no two figures are equal."""
    size, value, records = read_size("small"), 0.1, []
    for method in methods:
        for cell in cells_of(size, method):
            scores = {}
            for model in MODELS[method]:
                scores[model] = {}
                for client in CLIENTS:
                    value += 0.001
                    own = dict.fromkeys(METRICS.values(), value + shift)
                    scores[model][client] = own | {"loss": value + shift}
            answers = {
                model: {client: f"{model} answers | *{client}*" for client in ASKED}
                for model in MODELS[method]
            }
            result = {"scores": scores, "answers": answers, "penalty_share": None}
            counts = dict.fromkeys(COUNTED, (400, 110, 8))
            result["rows"] = dict.fromkeys(CLIENTS, counts)
            if method.startswith("fedjudge"):
                result["penalty_share"] = 0.05
                result["rounds"] = {
                    client: [scores[model][client]] * size.fedjudge.rounds
                    for client, model in zip(CLIENTS, MODELS[method][1:], strict=True)
                }
            records.append(record_of(cell, result))
    return records


def test_results_of_other_settings_are_neither_shown_nor_averaged(tmp_path):
    records = legal_records(["bare", "center", "fedjudge-base"])
    records[1]["settings"]["run"]["train.learning-rate"] = 0.5
    records[-1]["settings"]["data"] = "of other rows"
    write_record(tmp_path, "small", records)
    text, _ = reproduction(tmp_path, FEDJUDGE)
    assert f"{len(records) - 1} measurements" in text
    for model in ("Center", "FedJudge-Base"):
        assert f"| {model} | not run · " in text


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_it_shows_what_is_there(tmp_path, count):
    methods = list(MODELS)[:count]
    write_record(tmp_path, "small", legal_records(methods))
    text, pictures = reproduction(tmp_path, FEDJUDGE)
    assert "## Medium: one GPU\n\nNot run yet" in text
    named = [model for method in methods for model in MODELS[method]]
    table, _, rest = text.partition("Legal consultation")
    for model in named:
        (line,) = [line for line in table.splitlines() if line.startswith(f"| {model} |")]
        assert line.count("·") == len(METRICS), "the paper's figures are beside all of its own"
        assert "not run" not in line
    assert text.count("8 (110 of 400 fit)") == (9 if count else 0)
    assert (NOT_RUN in text.partition("## Medium")[0]) == (0 < count < 6)
    assert ("fedjudge-figure3.svg" in text) == (len(pictures) > 0) == (count > 5)
    if count:
        assert r"Bare model answers \| \*consultation\*" in rest
        assert ("CL-Client2 answers" in rest) == (count == 7)
    assert "needs sheets that annotators have filled in" in text or not count


def test_every_number_follows_from_the_record(tmp_path):
    write_record(tmp_path, "small", legal_records(MODELS))
    before, _ = reproduction(tmp_path, FEDJUDGE)
    changed = legal_records(MODELS, shift=0.5)
    write_record(tmp_path, "small", changed)
    after, _ = reproduction(tmp_path, FEDJUDGE)
    assert len(read_record(tmp_path, "small")) == len(changed), "later results replace earlier ones"
    own = r"\d+\.\d+ ± \d+\.\d+"
    assert re.findall(own, before)
    assert not set(re.findall(own, before)) & set(re.findall(own, after))


def test_it_has_the_human_evaluation_beside_the_papers(tmp_path):
    criteria = ("usefulness", "fluency")
    result = {
        "annotators": 3,
        "questions": 20,
        "means": {"CL-Client2": {"usefulness": 3.257, "fluency": 2.5}},
        "half_widths": {"CL-Client2": {"usefulness": 0.31, "fluency": None}},
        "agreement": dict.fromkeys(criteria, 0.625),
    }
    write_record(tmp_path, "small", [record_of(SheetsCell(), result)])
    text, _ = reproduction(tmp_path, FEDJUDGE)
    assert "| CL-Client2 | 3.26 · *4.11* | 2.50 · *4.62* |" in text
    assert "| FedJudge-CL | not run · *3.92* | not run · *4.56* |" in text
    assert "20 questions, 3 annotators" in text


def test_it_has_the_comparison_of_the_penalty(tmp_path):
    result = {"share": 0.1, "distance": 0.5, "personalised": {"court": 1.0}, "seed": 0}
    results = [
        {"importance": "server", "lambda": weight, "seeds": [result | {"global": {"court": loss}}]}
        for weight, loss in ((0.0, 2.0), (0.25, 1.5))
    ]
    record = {
        "settings": {"model.name": "smollm2", "rounds": 3, "train.local-steps": 5},
        "model digest": "f" * 64,
        "versions": {"torch": "1.0"},
        "rows": [["server", 0.1, 0.25]],
        "results": results,
    }
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "continual.json").write_text(json.dumps(record))
    text, _ = reproduction(tmp_path, FEDJUDGE)
    assert "| server | 10 % | 0.25 |" in text
    assert "One seed shows nothing about the difference." in text
