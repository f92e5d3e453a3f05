"""Tables of own results beside the papers' figures, as Markdown and CSV."""

import csv
from decimal import Decimal

import pytest

from bench.paper import fl_glm_cells
from bench.paper.cells import Results, described
from bench.paper.fl_glm_values import losses_lowered
from bench.paper.published import published
from bench.paper.sizes import read_size
from bench.paper.tables import Document, Table, Value, write_document


def table(own, other=(), reason=""):
    rows = [
        (("T5", "large"), (Value(published=Decimal("85.7"), quoted=True), Value(quoted=True))),
        (("split", "2 clients"), (Value(own, Decimal("80.0")), Value(other, None, reason))),
    ]
    return Table("Accuracy", ("model", "size", "CB", "COPA"), rows)


def test_own_figures_have_their_spread_and_the_papers_beside_them():
    text = table([70.0, 74.0], [50.0]).markdown()
    assert "| split | 2 clients | 72.0 ± 2.8 · *80.0* | 50.0 |" in text
    assert "| T5 | large | *85.7* | – |" in text
    timed = Value([1.26], Decimal("87.3"), published_deviation=Decimal("4.9"))
    assert timed.text(digits=2) == "1.26 · *87.3 ± 4.9*"
    assert Value([2.5], digits=3).text(digits=1) == "2.500"


def test_what_was_not_run_says_so_with_its_reason():
    own = Table("Accuracy", ("", "CB"), [(("split",), (Value(published=Decimal("80.0")),))])
    assert own.markdown() == "**Accuracy**\n\nNot run yet.\n"
    missing = "Not run: split, 2 clients: there is no data."
    partly = table([70.0], reason="there is no data").markdown()
    assert "| split | 2 clients | 70.0 · *80.0* | not run |" in partly
    assert missing in partly
    assert "no data" not in table([70.0], [60.0], reason="there is no data").markdown()
    assert Document().markdown() == "Not run yet.\n"


def test_the_papers_figures_stand_where_nothing_was_run():
    literature = table([]).markdown()
    assert "| T5 | large | *85.7* | – |" in literature
    assert "| split | 2 clients | not run · *80.0* | not run |" in literature
    reason = Value(published=Decimal("4.1"), reason="there are no sheets")
    text = Table("Means", ("", "fluency"), [(("CL-Client2",), (reason,))]).markdown()
    assert "| CL-Client2 | not run · *4.1* |" in text and "Not run: there are no sheets." in text


def test_csv_has_a_line_for_each_figure(tmp_path):
    document = Document([table([70.0, 74.0], reason="no data")], {"curve": "<svg/>"}, "Text.\n")
    write_document(tmp_path / "fl-glm-table1", document)
    with (tmp_path / "fl-glm-table1.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["column"] for line in lines] == ["CB", "COPA"] * 2
    own = lines[2]
    assert (own["model"], own["size"], own["mean"], own["seeds"]) == (
        "split",
        "2 clients",
        "72.0",
        "2",
    )
    assert float(own["standard deviation"]) == pytest.approx(8**0.5)
    assert own["paper"] == "80.0"
    assert [line["note"] for line in lines] == ["quoted", "quoted", "", "no data"]
    text = (tmp_path / "fl-glm-table1.md").read_text()
    assert "![curve](curve.svg)" in text and text.endswith("Text.\n")
    assert (tmp_path / "curve.svg").read_text() == "<svg/>"


def test_several_tables_have_a_file_each(tmp_path):
    write_document(tmp_path / "two", Document([table([1.0]), table([2.0])]))
    assert {file.name for file in tmp_path.iterdir()} == {"two.md", "two-1.csv", "two-2.csv"}


def test_published_figures_are_found_by_row_and_column():
    assert published("fedjudge-table2").figure("FedJudge-CL", "consultation R-1") == 40
    assert published("fedjudge-table3").figure("Center-Client3", "reasoning Bert-S") == Decimal(
        "74.95"
    )
    assert published("fl-glm-table1").figure("ChatGLM-6B", "MultiRC EM") == Decimal("45.6")
    assert str(published("fl-glm-table1").figure("FL-GLM", "CB accuracy")) == "83.9"
    assert published("fl-glm-table8").figure("WSC, 100", "client-batch") == Decimal("65.4")
    assert str(published("fedjudge-table2").figure("FedJudge-CL", "court R-L")) == "59.10"
    with pytest.raises(KeyError):
        published("fl-glm-table8").figure("WSC, 100", "parallel")


def test_losses_that_training_has_not_lowered_are_named():
    size, model = read_size("small"), "HuggingFaceTB/SmolLM2-135M-Instruct"
    trained = fl_glm_cells.split(size, "rte")
    records = [(fl_glm_cells.bare("rte", model), 2.0), (trained[0], 1.5), (trained[1], 2.5)]
    results = Results(
        {"cell": described(cell), "settings": {}, "result": {"loss": loss}}
        for cell, loss in records
    )
    (sentence,) = losses_lowered(results, trained)
    assert "lower than the bare model's after 1 of 2 trainings" in sentence
    assert sentence.endswith("it is not after: RTE, serial, period 2, seed 1.")
    (sentence,) = losses_lowered(results, trained[:1])
    assert sentence.endswith("after 1 of 1 trainings.")
    assert losses_lowered(results, trained[2:]) == []
