"""FedJudge's tables in ``bench.paper``: its methods are real runs, scored on all clients' rows."""

import json
import sys

import pytest
import torch

from bench.paper.__main__ import main
from bench.paper.cells import LegalCell, Results, SheetsCell, described
from bench.paper.fedjudge import ARTEFACTS
from bench.paper.fedjudge_cells import cells_of
from bench.paper.legal import ASKED, CLIENTS, METRICS, MODELS
from bench.paper.legal_data import legal_rows
from bench.paper.measuring import inputs_of, measure
from bench.paper.sizes import read_size
from bench.paper.sources import SourceError, Sources
from chambers.sheet.blinding import CRITERIA, Key, KeyRow
from tests.conftest import WORDS, write_rows
from tests.in_process import run_in_process


@pytest.fixture(scope="module")
def sources(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("legal")
    for number, client in enumerate(CLIENTS):
        write_rows(folder / "data" / "legal" / client / "train.jsonl", 10 + number, number)
        write_rows(folder / "data" / "legal" / client / "test.jsonl", 5, 100 + number)
    (folder / "models").mkdir()
    (folder / "models" / "gemma-3-270m").symlink_to(checkpoint)
    return Sources(folder / "data", folder / "models")


@pytest.fixture(scope="module")
def size():
    """The small size, with less of everything."""
    small = read_size("small")
    changes = {"rows": 8, "rounds": 2, "local_steps": 2, "max_length": 128, "questions": 3}
    changes |= {"prompt_length": 128}
    changes |= {"new_tokens": 4, "encoder": "", "weight": 0.5, "importance_examples": 4}
    own = small.fedjudge.model_copy(update=changes)
    return small.model_copy(update={"fedjudge": own, "seeds": 1})


@pytest.fixture(scope="module")
def results(size, sources):
    """The result of each method."""
    return {method: measure(cells_of(size, method)[0], size, sources) for method in MODELS}


@pytest.mark.nightly
def test_every_model_is_scored_on_every_clients_rows(results):
    models = {name: scores for r in results.values() for name, scores in r["scores"].items()}
    assert list(models) == [name for names in MODELS.values() for name in names]
    scores = {*METRICS.values(), "loss"} - {"bertscore"}
    for of_clients in models.values():
        assert list(of_clients) == list(CLIENTS)
        assert all(own.keys() == scores for own in of_clients.values())
    losses = [own["loss"] for of_clients in models.values() for own in of_clients.values()]
    assert len(set(losses)) == len(losses), "no model was scored twice under two names"


@pytest.mark.nightly
def test_the_penalty_applies_from_the_second_round_on(results):
    base, continual = results["fedjudge-base"], results["fedjudge-cl"]
    for client in CLIENTS:
        assert base["rounds"][client][0] == continual["rounds"][client][0]
        assert base["rounds"][client][1] != continual["rounds"][client][1]
    assert continual["penalty_share"] > 0 and base["penalty_share"] is None
    for result, method in ((base, "fedjudge-base"), (continual, "fedjudge-cl")):
        for client, name in zip(CLIENTS, MODELS[method][1:], strict=True):
            assert result["rounds"][client][-1] == result["scores"][name][client]


@pytest.mark.nightly
def test_losses_are_those_of_the_program(size, sources, results, checkpoint, tmp_path):
    """Of the run that ``presets/baselines/fedavg.toml`` describes, on the same rows."""
    own = size.fedjudge
    for client in CLIENTS:
        for file, most in zip(sources.parts(client), (own.rows, own.questions), strict=True):
            copied = tmp_path / "data" / client / file.name
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text("".join(file.read_text().splitlines(keepends=True)[:most]))
    values = {
        **{"strategy": "fedjudge-base", "rounds": own.rounds, "model.name": str(checkpoint)},
        **{"data.path": str(tmp_path / "data"), "data.max-length": own.max_length},
        **{"adapter.rank": own.rank, "adapter.targets": own.targets, "model.dtype": "float32"},
        **{"train.local-steps": own.local_steps, "train.learning-rate": own.learning_rate},
        **{"train.batch-size": own.batch_size, "train.accumulation": own.accumulation},
        **{"train.max-gradient-norm": own.max_gradient_norm, "evaluate.generate": False},
    }
    events = run_in_process(values, tmp_path / "state", 3).events
    found = {(e["client"], e["model"]): e["loss"] for e in events if e["event"] == "evaluate"}
    scores = {**results["bare"]["scores"], **results["fedjudge-base"]["scores"]}
    for number, client in enumerate(CLIENTS, start=1):
        for name, model in (
            ("Bare model", "base"),
            ("FedJudge-Base", "global"),
            (f"Base-Client{number}", "personalised"),
        ):
            assert scores[name][client]["loss"] == pytest.approx(found[client, model], abs=1e-5)


def _records(size, results):
    return [
        {"cell": described(cells_of(size, method)[0]), "settings": {}, "result": result}
        for method, result in results.items()
    ]


@pytest.mark.nightly
def test_documents_are_made_of_results(size, results):
    found = Results(_records(size, results))
    by_name = {artefact.name: artefact.document(size, found) for artefact in ARTEFACTS}
    for table in by_name["fedjudge-table2"].tables:
        assert len(table.rows) == 13
        assert "not run" in table.markdown(), "there is no encoder for BERTScore"
    (table,) = by_name["fedjudge-figure3"].tables
    assert len(table.rows) == len(CLIENTS) * len(("Base-Client", "CL-Client")) * len(("R-L", "B-N"))
    assert all(len(values) == size.fedjudge.rounds for _, values in table.rows)
    (svg,) = by_name["fedjudge-figure3"].figures.values()
    assert "Base-Client" in svg and "BERTScore" not in svg
    assert by_name["fedjudge-figures4-5"].markdown().count("**Bare model**") == len(ASKED)


@pytest.mark.nightly
def test_the_full_size_has_the_papers_model(size, results):
    full = read_size("full")
    cells = [cell for method in MODELS for cell in cells_of(full, method)]
    assert {cell.model for cell in cells} == {"baichuan-inc/Baichuan-7B"}
    records = [
        {"cell": described(cell), "settings": {}, "result": results[cell.method]} for cell in cells
    ]
    document = ARTEFACTS[0].document(full, Results(records))
    assert document.text.startswith("baichuan-inc/Baichuan-7B. ")
    document = ARTEFACTS[0].document(size, Results(_records(size, results)))
    assert document.text.startswith("google/gemma-3-270m in place of Baichuan-7B. ")


def test_a_missing_encoder_is_named_before_anything_starts(size, sources):
    own = size.fedjudge.model_copy(update={"encoder": "/nowhere/encoder"})
    with pytest.raises(SourceError, match=r"BERTScore's encoder /nowhere/encoder: there is no fol"):
        inputs_of(
            LegalCell(size.models.legal, "bare"),
            size.model_copy(update={"fedjudge": own}),
            sources,
        )


def test_table_5_needs_sheets(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["paper", "fedjudge-table5", "--small"])
    with pytest.raises(SystemExit, match="--sheets needs key"):
        main()


def test_filled_sheets_become_table_5(size, tmp_path):
    rows, lines = {}, ["id," + ",".join(CRITERIA)]
    for model, scores in (("FedJudge-CL", (4, 5)), ("CL-Client2", (5, 3))):
        for question in (1, 2):
            name = f"{model}-{question}"
            rows[name] = KeyRow(1, question, f"q{question}", model)
            lines.append(f"{name},{scores[question - 1]},{scores[0]}")
    key = tmp_path / "key.json"
    sheet = tmp_path / "annotator-1.csv"
    key.write_text(Key(0, ("FedJudge-CL", "CL-Client2"), rows).to_json())
    sheet.write_text("\n".join(lines))
    sources = Sources(sheets=(key, sheet))
    inputs_of(SheetsCell(), size, sources)
    result = measure(SheetsCell(), size, sources)
    document = ARTEFACTS[-1].document(
        size, Results([{"cell": described(SheetsCell()), "settings": {}, "result": result}])
    )
    text = document.markdown()
    assert "| FedJudge-CL | 4.50 · *3.92* | 4.00 · *4.56* |" in text
    assert "| Base-Client2 | not run · *3.88* | not run · *4.45* |" in text
    sheet.write_text("\n".join(lines[:-1]))
    with pytest.raises(SourceError, match="is missing"):
        inputs_of(SheetsCell(), size, sources)


def test_rows_that_do_not_fit_are_left_out_and_none_is_shortened(size, checkpoint, tmp_path):
    def rows(longest_answer):
        """Return three rows: a short one, one with a long answer, and one with a long question."""
        lengths = ((2, 2), (2, longest_answer), (150, 2))
        return [
            {"instruction": f"{WORDS[i]} " * asked, "output": f"{WORDS[-1 - i]} " * told}
            for i, (asked, told) in enumerate(lengths)
        ]

    found = []
    for longest_answer in (3, 150):
        for name in ("train", "test"):
            lines = (json.dumps(row) for row in rows(longest_answer))
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        parts = (tmp_path / "train.jsonl", tmp_path / "test.jsonl")
        found.append(legal_rows(parts, checkpoint, size.fedjudge))
    brief, long = found
    assert [prompt.row for prompt in brief.prompts] == [0, 1]
    for one, other in zip(brief.prompts, long.prompts, strict=True):
        assert torch.equal(one.tokens, other.tokens), "an answer has no influence on its prompt"
    assert [len(own.train) for own in found] == [len(own.examples) for own in found] == [2, 1]
    assert long.counts == {
        "training rows": (3, 1, 1),
        "prompts": (3, 2, 2),
        "held-out rows": (3, 1, 1),
    }
