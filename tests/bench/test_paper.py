"""``bench.paper``: cells are real runs of the program, and are shared, kept and continued."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from bench.paper import fl_glm, fl_glm_cells
from bench.paper.__main__ import main
from bench.paper.cells import CellFolder, Results, SplitCell, TaskCell, TimeCell, described
from bench.paper.fl_glm_values import MAIN
from bench.paper.measuring import Measuring, inputs_of, measure, settings_of
from bench.paper.sizes import NAMES, read_size
from bench.paper.sources import Sources
from bench.paper.task_data import write_task
from bench.paper.task_settings import training_of
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.model.base_model import load_tokenizer
from finetuning.tasks.tasks import TASKS
from tests.bench.paper_data import write_tasks

MODEL = "owner/deep"


@pytest.fixture(scope="module")
def sources(tmp_path_factory, deep_checkpoint):
    models = tmp_path_factory.mktemp("models")
    for name in ("deep", "SmolLM2-135M-Instruct"):
        (models / name).symlink_to(deep_checkpoint)
    return Sources(write_tasks(tmp_path_factory.mktemp("data")), models)


@pytest.fixture(scope="module")
def size():
    """The small size, with fewer steps."""
    small = read_size("small")
    default = small.fl_glm.training["default"].model_copy(
        update={"steps": 8, "rows": 4, "micro_batch": 2, "questions": 6}
    )
    time_cells = small.fl_glm.time.model_copy(update={"model": MODEL, "rows": 8, "max_length": 64})
    changed = {"training": {"default": default}, "time": time_cells}
    own = small.fl_glm.model_copy(update=changed)
    return small.model_copy(update={"fl_glm": own, "seeds": 2})


@pytest.mark.nightly
def test_the_bare_model_has_the_loss_of_a_plain_loop(size, sources, deep_checkpoint):
    from transformers import AutoModelForCausalLM

    result = measure(TaskCell("boolq", MODEL, "bare"), size, sources)
    rows = sources.parts("boolq")[1].read_text().splitlines()[:6]
    model = AutoModelForCausalLM.from_pretrained(deep_checkpoint)
    tokenizer = load_tokenizer(deep_checkpoint)
    losses = []
    for row in map(json.loads, rows):
        question = f"{row['passage']} Question: {row['question']}? Answer:"
        answer = "yes" if row["label"] else "no"
        messages = [("user", question), ("assistant", answer)]
        row = Row(tuple({"role": r, "content": c} for r, c in messages), "", {})  # noqa: PLW2901
        ((example,), _) = tokenize([row], tokenizer, 1000)
        with torch.no_grad():
            logits = model(example.tokens[None]).logits[0, :-1].log_softmax(-1)
        targets = example.is_target.nonzero()[:, 0]
        losses += [-float(logits[place - 1, example.tokens[place]]) for place in targets]
    assert result["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert result["questions"] == 6 and result["majority"] == {"accuracy": 0.5}


def test_a_schedule_with_one_client_is_centralised_training(size, sources):
    """But for the wire's precision."""
    both = [
        measure(TaskCell("cb", MODEL, method, "lora", clients=1, period=4, seed=1), size, sources)
        for method in ("centralised", "serial")
    ]
    assert both[0]["rows"] == both[1]["rows"] == 32
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], abs=0.01)
    assert both[0]["training_loss"][1] < both[0]["training_loss"][0]


@pytest.mark.nightly
def test_questions_are_of_as_many_passages_as_there_are(size, sources, deep_checkpoint, tmp_path):
    data = write_task(
        task_name="multirc",
        parts=sources.parts("multirc"),
        model=deep_checkpoint,
        training=training_of("multirc", size),
        clients=2,
        folder=tmp_path,
    )
    questions = data.prepared.questions
    assert len(questions) == 6, "two answers to each of three questions"
    assert len({question.prompt.partition(" Question:")[0] for question in questions}) == 3
    held_out = (tmp_path / f"{TASKS['multirc'].held_out}.jsonl").read_text().splitlines()
    asked = [row["passage"]["questions"] for row in map(json.loads, held_out)]
    assert [len(of_row) for of_row in asked] == [1, 1], "a question for each client"


def test_tasks_without_data_are_left_out(size, sources, tmp_path):
    folder = CellFolder(tmp_path, [])
    measuring = Measuring(size=size, sources=sources, folder=folder, processes=1)
    cells = [TaskCell(task, MODEL, "bare") for task in ("boolq", "wsc", "cb")]
    (reason,) = measuring.without_data(cells).values()
    assert list(measuring.without_data(cells)) == [cells[1]] and "no folder WSC" in reason


@pytest.mark.nightly
def test_clients_are_stacked_and_divided_by_label(size, sources):
    """All clients work at the same time in this process, each with its own head and tail."""
    cell = TaskCell(
        **{"task": "copa", "model": MODEL, "method": "client-batch", "adapter": "prefix"},
        **{"clients": 2, "period": 2, "partition": "label", "curve": True},
    )
    result = measure(cell, size, sources)
    assert result["rows"] == 32
    assert [rows for rows, _ in result["curve"]] == [16]
    # Rows are stacked in the order in which they arrive, which changes the last digits.
    again = measure(cell, size, sources)
    assert result["loss"] == pytest.approx(again["loss"], abs=1e-3)
    assert result["loss"] < 7  # that of equally likely tokens is 5.8


@pytest.mark.nightly
def test_times_are_of_the_second_round(size, sources):
    for method, clients in (("centralised", 1), ("hierarchical", 3)):
        result = measure(TimeCell(method, clients), size, sources)
        assert result["rows"] == 8 // clients * clients and result["seconds"] > 0


def test_cells_are_kept_until_their_settings_change(size, sources, tmp_path):
    cell = TaskCell("copa", MODEL, "bare")
    measuring = Measuring(size, sources, CellFolder(tmp_path), processes=1)
    assert measuring.known([cell]) == {cell: None}
    settings = settings_of(cell, size) | inputs_of(cell, size, sources)
    record = CellFolder(tmp_path).write(cell, settings, {"loss": 1.0}, seconds=2.0)
    assert measuring.known([cell]) == {cell: record}
    own = size.fl_glm.model_copy(update={"dtype": "bfloat16"})
    other = size.model_copy(update={"fl_glm": own})
    changed = Measuring(other, sources, CellFolder(tmp_path), processes=1)
    assert changed.known([cell]) == {cell: None}
    again = CellFolder(tmp_path, recorded=[record])
    again.write(cell, settings | {"dtype": "bfloat16"}, {"loss": 3.0}, seconds=2.0)
    assert Measuring(size, sources, again, processes=1).known([cell]) == {cell: record}


def test_tables_and_figures_share_their_cells():
    size = read_size("small")
    table8 = set(fl_glm_cells.table8(size))
    serial = {cell for cell in fl_glm_cells.table5(size) if cell.method == "serial"}
    assert serial and serial <= table8
    even = {cell for cell in fl_glm_cells.figure5(size) if cell.partition == "iid"}
    assert even <= table8
    first = {cell for cell in fl_glm_cells.figures6to8(size) if cell.clients in (0, 2)}
    assert first <= table8


@pytest.mark.parametrize("name", NAMES)
def test_every_document_is_made_of_all_results_or_none(name):
    """Of random ones here: each has the metrics of its task."""
    size, source = read_size(name), random.Random(0)

    def invented(cell):
        if isinstance(cell, TimeCell):
            return {"seconds": source.random(), "rows": 8}
        if isinstance(cell, SplitCell):
            side = {name: source.random() for name in ("accuracy", "f1a", "loss")}
            own = {"whole": side, "split": side, "other answers": 0, "difference": 0.0}
            return {"models": {"base": own, "tuned": own}, "questions": 100}
        names = ("accuracy", "f1", "f1a", "em", "bleu4", "rouge1", "rouge2", "rougeL", "tokens")
        scores = {metric: source.random() for metric in names}
        if not isinstance(cell, TaskCell):
            return scores
        trained = {"rows": 96, "training_rows": 400, "questions": 100, "loss": source.random()}
        trained["curve"] = [[48, scores]]
        return trained | {"metrics": scores, "majority": scores}

    for artefact in fl_glm.ARTEFACTS:
        cells = artefact.cells(size)
        records = [
            {"cell": described(cell), "settings": {}, "result": invented(cell)} for cell in cells
        ]
        text = artefact.document(size, Results([])).markdown()
        assert "not run" in text.lower()
        document = artefact.document(size, Results(records))
        assert ("not run" in document.markdown().lower()) == (not cells)
        assert bool(document.figures) == ("figure" in artefact.name)
        assert all(table.csv() for table in document.tables)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["fl-glm-table7", "--small"], "there is no fl-glm-table7; there are "),
        (["--small"], "name tables and figures, or --all"),
        (["fl-glm-table5", "--small"], "--data is missing"),
        (["fl-glm-table5", "--small", "--data", "/nowhere"], "--data /nowhere: there is no such"),
        (["fl-glm-table5", "--small", "--data", "DATA"], "SmolLM2-135M-Instruct"),
        (["fl-glm-table6", "--small", "--data", "DATA", "--models", "MODELS"], "huatuo"),
        (["fl-glm-table5", "--small", "--render"], "--render needs --document"),
        (["--all", "--small", "--data", "EMPTY", "--models", "MODELS"], "nothing can be run"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    words, reason, sources, tmp_path, monkeypatch
):
    (tmp_path / "empty").mkdir()
    places = {
        "DATA": str(sources.data),
        "MODELS": str(sources.models),
        "EMPTY": str(tmp_path / "empty"),
    }
    words = [places.get(word, word) for word in words]
    monkeypatch.setattr(sys, "argv", ["paper", *words, "--folder", str(tmp_path / "results")])
    with pytest.raises(SystemExit, match=reason):
        main()
    assert not (tmp_path / "results").exists()


@pytest.mark.nightly
def test_an_interrupted_command_continues(sources, tmp_path):
    folder, docs = tmp_path / "results", tmp_path / "docs"
    names = ["fl-glm-table4", "fl-glm-table5", "fl-glm-figure5"]
    command = [sys.executable, "-m", "bench.paper", *names, "--small", "--seeds", "1"]
    command += ["--data", str(sources.data), "--models", str(sources.models)]
    command += ["--folder", str(folder), "--document", str(docs)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cells = folder / "small" / "cells"
    while len(list(cells.glob("*.json"))) < 3:
        assert first.poll() is None, first.stdout.read().decode()
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    kept = {file: file.stat().st_mtime_ns for file in cells.glob("*.json")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of " in done.stdout
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items())
    for name in names:
        assert (folder / "small" / f"{name}.md").is_file()
    assert (folder / "small" / "fl-glm-figure5.svg").is_file()
    records = (docs / "recorded" / "paper" / "small.jsonl").read_text().splitlines()
    assert len(records) == len(list(cells.glob("*.json")))
    assert all(str(sources.models) not in line for line in records)
    assert "FL-GLM, table 5" in (docs / "reproduction.md").read_text()


@pytest.mark.parametrize("task", ["copa", "multirc"])
@pytest.mark.nightly
def test_a_split_model_answers_like_the_whole_one(size, sources, task):
    result = measure(SplitCell(task, MODEL), size, sources)
    assert result["questions"] >= 6
    metric = MAIN.get(task, "accuracy")
    for own in result["models"].values():
        assert own["split"]["loss"] == pytest.approx(own["whole"]["loss"], abs=1e-5)
        assert own["split"][metric] == own["whole"][metric]
        assert own["other answers"] == 0 and own["difference"] < 1e-5
    base, tuned = (own["whole"]["loss"] for own in result["models"].values())
    assert abs(base - tuned) > 1e-3, "the adapter has an influence"
