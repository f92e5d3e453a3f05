"""``chambers evaluate``: with whole models, and with a block server in another process."""

import json
import shutil

import pytest

from chambers.__main__ import main
from tests.chambers.conftest import execute, refused

WORDS = ["the court holds", "goods were never delivered", "this claim is upheld", "who signed"]


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


HARNESS = """
task: repeat_local
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Premise: {{{{premise}}}} Answer:"
doc_to_target: "{{{{label}}}}"
doc_to_choice: [entailment, neutral, contradiction, "neither of them"]
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
---
task: read_local
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{{{premise}}}}"
metric_list: [{{metric: word_perplexity}}]
---
task: write_local
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: generate_until
validation_split: validation
doc_to_text: "{{{{premise}}}}"
doc_to_target: "{{{{hypothesis}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12}}
metric_list: [{{metric: chrf}}]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows of several tasks, in folders with their published names or with the tasks' names."""
    folder = tmp_path_factory.mktemp("superglue")
    labels = ["entailment", "neutral", "contradiction", "neutral"]
    write(
        folder / "CB" / "val.jsonl",
        [
            {"premise": words, "hypothesis": "a contract", "label": label}
            for words, label in zip(WORDS, labels, strict=True)
        ],
    )
    write(
        folder / "copa" / "val.jsonl",
        [
            {
                **{"premise": words, "choice1": "costs are shared", "choice2": "a town"},
                **{"question": "effect", "label": number % 2},
            }
            for number, words in enumerate(WORDS)
        ],
    )
    answers = [{"text": words, "label": number % 2} for number, words in enumerate(WORDS)]
    questions = [{"question": f"{words}?", "answers": answers} for words in WORDS[:2]]
    passage = {"text": " ".join(WORDS), "questions": questions}
    write(folder / "MultiRC" / "val.jsonl", [{"passage": passage}])
    write(folder / "xsum" / "test.jsonl", [{"document": w, "summary": w} for w in WORDS])
    return folder


ALL = ("--tasks", "cb,copa,multirc,xsum", "--max-new-tokens", "4")


@pytest.mark.slow
def test_split_scores_are_those_of_the_whole(run_folder, base, served, data, tmp_path, capsys):
    """Score the base model, the global adapter and a personalised one, in one table."""
    mine = run_folder / "adapters" / "clients" / "alpha"
    words = ["evaluate", *ALL, "--data", data, "--output", tmp_path / "scores.json"]
    shown = execute(capsys, *words, run_folder, mine)
    whole = json.loads((tmp_path / "scores.json").read_text())
    assert list(whole["models"]) == [str(base), str(run_folder), str(mine)]
    assert whole["models"][str(run_folder)] == {
        **{"base": str(base), "dtype": "auto", "quantization": "none", "split": False},
        **{"adapter": str(run_folder / "adapters" / "global")},
    }
    metrics = {name: list(task["models"][str(base)]) for name, task in whole["tasks"].items()}
    assert metrics == {
        "cb": ["accuracy", "f1", "probability", "seconds"],
        "copa": ["accuracy", "seconds"],
        "multirc": ["f1a", "em", "probability", "seconds"],
        "xsum": ["rouge1", "rouge2", "rougeL", "seconds"],
    }
    assert [task["questions"] for task in whole["tasks"].values()] == [4, 4, 8, 4]
    assert whole["tasks"]["cb"]["majority"]["accuracy"] == 0.5
    for name in ("majority", "cb", "multirc", "50.0"):
        assert name in shown
    cb = whole["tasks"]["cb"]["models"]
    assert len({model["probability"] for model in cb.values()}) == 3

    # The invitation's server has the global model and alpha's personalised one.
    execute(capsys, *words, "--invitation", served / "alpha.json", run_folder, mine)
    split = json.loads((tmp_path / "scores.json").read_text())
    assert all(model["split"] for model in split["models"].values())
    for name, task in whole["tasks"].items():
        for model, scores in task["models"].items():
            del scores["seconds"], split["tasks"][name]["models"][model]["seconds"]
            assert split["tasks"][name]["models"][model] == pytest.approx(scores, abs=1e-5)


def test_a_base_model_alone_and_a_folder_of_one_task(base, data, tmp_path, capsys):
    scores = []
    for folder, words in ((data, [base]), (data / "CB", ["--model", base])):
        execute(
            capsys,
            *("evaluate", "--tasks", "CB", "--data", folder, "--limit", "3"),
            *("--output", tmp_path / "scores.json", *words),
        )
        scores.append(json.loads((tmp_path / "scores.json").read_text()))
        scores[-1]["tasks"]["cb"]["models"][str(base)].pop("seconds")
    assert scores[0] == scores[1]
    assert scores[0]["tasks"]["cb"]["questions"] == 3


def test_what_has_been_scored_is_kept(base, data, tmp_path, capsys):
    """The encoder has no weights, which is noticed only after generating the answers."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    words = ["evaluate", *ALL, "--data", data, "--output", tmp_path / "scores.json"]
    assert main(list(map(str, [*words, "--bertscore", tmp_path, base]))) == 2
    shown = capsys.readouterr()
    assert "multirc" in shown.out and "can't be used" in shown.err
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores["tasks"]) == ["cb", "copa", "multirc", "xsum"]
    assert list(scores["tasks"]["xsum"]["models"]) == [str(base)]


@pytest.mark.nightly
def test_tasks_of_the_harness_over_a_lane(run_folder, base, served, data, tmp_path, capsys):
    for number, task in enumerate(HARNESS.split("---")):
        described = task.format(file=data / "CB" / "val.jsonl")
        (tmp_path / f"task-{number}.yaml").write_text(described)
    names = "repeat_local,read_local,write_local"
    words = ["evaluate", "--tasks", f"{names},cb", "--include", tmp_path, "--data", data]
    words += ["--output", tmp_path / "scores.json", run_folder]
    found = []
    for where in ([], ["--invitation", served / "alpha.json"]):
        assert "repeat_local" in execute(capsys, *words, *where)
        found.append(json.loads((tmp_path / "scores.json").read_text())["tasks"])
        for name in (str(base), str(run_folder)):
            del found[-1]["cb"]["models"][name]["seconds"]
    whole, split = found
    for name in names.split(","):
        for model, metrics in whole[name]["models"].items():
            assert split[name]["models"][model] == pytest.approx(metrics, rel=1e-4)
        assert whole[name]["questions"] == split[name]["questions"] == 4
    assert (
        whole["read_local"]["models"][str(base)] != whole["read_local"]["models"][str(run_folder)]
    )
    assert list(whole["repeat_local"]["models"][str(base)]) == ["acc", "acc_norm"]
    refusal = refused(capsys, *words[:2], "none_such", *words[3:])
    assert "none_such is not a task of lm-evaluation-harness" in refusal


@pytest.mark.slow
def test_invalid_arguments_are_refused(run_folder, base, served, data, tmp_path, capsys):
    short = json.loads((served / "alpha.json").read_text()) | {"max_prompt_length": 5}
    (tmp_path / "short.json").write_text(json.dumps(short))
    empty = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("adapters"))
    for words, reason in (
        (["--tasks", "no-such-task", base], "--tasks no-such-task: no-such-task is "),
        (["--tasks", "", base], "--tasks names no task"),
        (["--tasks", "cb"], "no model is named"),
        (["--tasks", "cb", "--data", "/nowhere", base], "--data /nowhere"),
        (["--tasks", "cb", "--limit", "0", base], "'--limit': 0 is not in the range"),
        (["--tasks", "cb", "--output", "/nowhere/f.json", base], "there is no folder /nowhere"),
        (["--tasks", "cb", "--output", tmp_path, base], "that is a folder"),
        (["--tasks", "rte", base], f"rte: there is no {data}/RTE/val.jsonl"),
        (["--tasks", "cb", "/nowhere"], "there is no base model in /nowhere"),
        (["--tasks", "cb", empty], "the run completed no round"),
        (["--tasks", "xsum", "--bertscore", "/nowhere", base], "--bertscore: "),
        (["--tasks", "cb", "--batch-tokens", "20", base], "--batch-tokens allows only 20"),
        (["--tasks", "cb", "--invitation", tmp_path / "short.json", base], "server allows only 5"),
    ):
        assert reason in refused(capsys, "evaluate", "--data", data, *words), words
    write(tmp_path / "CB" / "val.jsonl", [{"premise": "a", "hypothesis": "b"}])
    refusal = refused(capsys, "evaluate", "--tasks", "cb", "--data", tmp_path, base)
    assert f"{tmp_path}/CB/val.jsonl:1: has no 'label'" in refusal
