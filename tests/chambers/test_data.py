"""Rows are read, rendered and tokenized before a run, and shown with what is left out."""

import json
import shutil

import pytest

from chambers.__main__ import main
from chambers.data import check_data
from chambers.errors import CommandError
from federation.run_config import parse_run_config
from finetuning.data.formats import DataError
from tests.chambers.conftest import refused
from tests.conftest import WORDS

ALTERNATE = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1]"
    ".role == 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}"
    "<end>{% endfor %}"
)


def write(file, *rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def asked(*questions):
    turns = [{"role": "user", "content": question} for question in questions]
    return {"conversations": [*turns, {"from": "gpt", "value": "the court holds"}]}


@pytest.fixture
def data(tmp_path):
    """Three clients: one has a bad row and a long one, one shards, and one two layouts."""
    long = {"prompt": " ".join(WORDS), "completion": " ".join(WORDS)}
    write(tmp_path / "北京" / "train.jsonl", *[asked("who signed")] * 3, {"text": "x"}, long)
    for number in (1, 2):
        row = {"instruction": "the claim", "output": "is upheld"}
        write(tmp_path / "Köln" / f"train-{number}.jsonl", *[row] * number)
    write(
        tmp_path / "محكمة" / "train.jsonl", asked("who") | {"id": 5}, {"query": "a", "answer": "b"}
    )
    write(tmp_path / "محكمة" / "dev.ndjson", asked("which"))
    (tmp_path / "محكمة" / "notes.txt").touch()
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_rows_are_shown_as_the_model_sees_them(capsys, checkpoint, data):
    words = (f"model.name={checkpoint}", "data.max-length=64")
    assert main(["data", str(data), *words]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"{data}: not used: .git/\n"
    bad = f"{data}/北京/train.jsonl:4"
    assert shown.out.splitlines()[:7] == [
        "Köln: 3 training rows in train-1.jsonl, train-2.jsonl",
        "  3 rows with instruction, output",
        f"  as the model sees {data}/Köln/train-1.jsonl:1:",
        "Instruction Input:",
        "the claim",
        "Instruction Output:",
        "⟦is upheld<end>⟧",
    ]
    assert shown.out.count("as the model sees") == 3
    for line in (
        "محكمة: 2 training rows in train.jsonl; 1 held-out rows in dev.ndjson; "
        "columns not used: id; files not used: notes.txt",
        "  2 rows with conversations",
        "  1 rows with query, answer",
        "北京: 4 training rows in train.jsonl (1 inputs shortened, 1 answers shortened); "
        "1 rows left out",
        f"  refused: {bad}: has only 'text', without an answer to learn from; divide the text",
        f"  cut by data.max-length = 64: {data}/北京/train.jsonl:5",
    ):
        assert line in shown.out.splitlines()


def test_rows_are_checked_before_a_run(capsys, checkpoint, data):
    values = {"model.name": str(checkpoint), "data.path": str(data), "min-nodes": 1}
    with pytest.raises(DataError, match=r"北京/train\.jsonl:4: has only 'text'"):
        check_data(parse_run_config(values), 3)
    check_data(parse_run_config(values | {"data.skip-bad-rows": True}), 3)
    lines = capsys.readouterr().err.splitlines()
    assert "北京: 4 training rows in train.jsonl; 1 rows left out" in lines
    assert any(
        line.startswith(f"  left out: {data}/北京/train.jsonl:4: has only") for line in lines
    )
    check_data(parse_run_config(values), 2)
    assert "not in this run: 北京" in capsys.readouterr().err.splitlines()
    write(data / "A&B" / "train.jsonl", asked("who"))
    with pytest.raises(CommandError, match=r"A&B' must be at most 64 letters.*; rename the folder"):
        check_data(parse_run_config(values), 4)
    (data / "A&B").rename(data / "Ko\u0308LN")  # as macOS writes it
    with pytest.raises(CommandError, match="confuse the names Ko\u0308LN, Köln"):
        check_data(parse_run_config(values), 4)


def test_of_many_clients_those_with_bad_rows_have_a_line(capsys, checkpoint, tmp_path):
    for number in range(25):
        write(tmp_path / f"client-{number:02}" / "train.jsonl", asked("who"), asked("is it"))
    write(tmp_path / "client-24" / "train.jsonl", {"text": "x"}, asked("who"))
    config = {"model.name": str(checkpoint), "data.path": str(tmp_path), "min-nodes": 1}
    check_data(parse_run_config(config | {"data.skip-bad-rows": True}), 25)
    lines = capsys.readouterr().err.splitlines()
    shown = [*(f"client-{number:02}" for number in (*range(20), 24)), "  left out"]
    assert [line.partition(":")[0] for line in lines] == shown


def test_rows_that_the_template_rejects_are_named(capsys, checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").write_text(ALTERNATE)
    write(tmp_path / "rows.jsonl", asked("who"), asked("who", "is it"))
    words = (f"model.name={model}", f"data.path={tmp_path}/rows.jsonl", "--clients", 2)
    execute = f"{tmp_path}/rows.jsonl:2: the chat template rejects this row: roles must alternate\n"
    assert refused(capsys, "train", *words).endswith(execute)
