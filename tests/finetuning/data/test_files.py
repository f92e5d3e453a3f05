"""Which files of a folder are rows of which part; what is left out is named."""

import re

import pytest

from finetuning.data.files import client_folders, find_part, find_parts
from finetuning.data.formats import DataError

SHARDS = [f"train-0000{number}-of-00002.parquet" for number in range(2)]


def files_in(folder, *names):
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.mkdir(exist_ok=True) if name.endswith("/") else file.write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("names", "train", "held_out"),
    [
        (["train.csv", "train.txt", "train.json/"], ["train.csv"], []),
        (["Train.JSONL", "TEST.jsonl.gz"], ["Train.JSONL"], ["TEST.jsonl.gz"]),
        ([*SHARDS, "test-00000-of-00001.parquet"], SHARDS, ["test-00000-of-00001.parquet"]),
        (["data/train.jsonl", "data/dev.jsonl", "README.md"], ["train.jsonl"], ["dev.jsonl"]),
        (["train/0000.parquet", "train/0001.parquet"], ["0000.parquet", "0001.parquet"], []),
        (
            ["train.json/part-0.json", "train.json/_SUCCESS", "train.json/.part-0.json.crc"],
            ["part-0.json"],
            [],
        ),
        (["train_1.jsonl", "train_2.jsonl"], ["train_1.jsonl", "train_2.jsonl"], []),
        (["train.jsonl", "test.csv", "validation.csv", "val.csv"], ["train.jsonl"], ["test.csv"]),
        (["train.jsonl", "validation.csv", "val.csv"], ["train.jsonl"], ["validation.csv"]),
    ],
)
def test_the_files_of_parts(tmp_path, names, train, held_out):
    parts = find_parts(files_in(tmp_path, *names), "test")
    assert [file.name for file in parts.train] == train
    assert [file.name for file in parts.held_out] == held_out
    used = {str(file.relative_to(tmp_path)).split("/")[0] for file in parts.train + parts.held_out}
    others = {name.split("/")[0] for name in names} - used
    assert {file.name for file in parts.unused} == others


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["train.jsonl", "train.csv"], "train.csv and train.jsonl; keep one"),
        (["train.jsonl", "train_old.jsonl"], "train.jsonl and train_old.jsonl; keep one"),
        (["train.jsonl", "Train.jsonl"], "Train.jsonl and train.jsonl; keep one"),
        (["train.jsonl", "data/train.jsonl"], "train.jsonl and train.jsonl; keep one"),
        (SHARDS[:1], f"has 1 of 2 shards of train: {SHARDS[0]}"),
        (["dataset_dict.json", "train/data-0.arrow"], '["train"].to_parquet("train.parquet")'),
        (["rows.jsonl", "train.zip", "old/"], "no train.jsonl (nor .ndjson, .json, .csv or "),
        (["rows.jsonl", "train.zip", "old/"], "found old/, rows.jsonl, train.zip"),
    ],
)
def test_what_is_ambiguous_or_missing_is_named(tmp_path, names, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        find_parts(files_in(tmp_path, *names), "test")


def test_the_part_of_a_task_comes_first(tmp_path):
    files_in(tmp_path, "test.jsonl", "val.jsonl", "train.jsonl")
    parts = find_parts(tmp_path, "val")
    assert [*parts.held_out, *parts.unused] == [tmp_path / "val.jsonl", tmp_path / "test.jsonl"]
    assert find_part(tmp_path, "none") == []


GOOD = ("北京/train.jsonl", "Köln/data/train.csv")


def test_hidden_folders_are_not_clients(tmp_path):
    files_in(tmp_path, *GOOD, ".Trash/train.jsonl", "__MACOSX/train.jsonl", "README.md")
    (tmp_path / ".#lock").symlink_to("nowhere")  # as Emacs makes them
    assert [folder.name for folder in client_folders(tmp_path)] == ["Köln", "北京"]
    alone = files_in(tmp_path / "hub", "data/train.jsonl")
    assert client_folders(alone) == client_folders(alone / "data" / "train.jsonl") == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("محكمة/rows.jsonl", "محكمة has rows.jsonl"),
        ("empty/", "1 of the 3 folders"),
        ("empty/", "empty has nothing"),
        ("validation.ndjson", "rows beside them that belong to no client.*: validation.ndjson"),
        ("clients.csv", "rows beside them that belong to no client.*: clients.csv"),
        ("data/train.jsonl", "rows beside them that belong to no client.*: data/"),
        ("mill/state.json", "mill was written by save_to_disk"),
    ],
)
def test_what_lies_beside_clients_must_be_one(tmp_path, name, reason):
    files_in(tmp_path, *GOOD, name)
    with pytest.raises(DataError, match=reason):
        client_folders(tmp_path)


@pytest.mark.parametrize("name", ["mill", "Köln/train.jsonl"])
def test_links_to_nothing_are_named(tmp_path, name):
    (files_in(tmp_path, *GOOD) / name).symlink_to("/nowhere")
    with pytest.raises(DataError, match=f"{name} is a link to a file or folder that doesn't exist"):
        client_folders(tmp_path)
