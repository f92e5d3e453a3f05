"""Which rows a client reads, in simulation and in a deployment."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from client_app.data import client_name, read_client_data
from finetuning.data.formats import DataError
from finetuning.settings import DataSettings


def write(path, outputs, **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": "Ask", "output": output} | fields for output in outputs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(name, count):
    return [f"{name} {number}" for number in range(count)]


def outputs(rows):
    return [row.messages[-1]["content"] for row in rows]


def simulated(path, index, count, seed=0, **settings):
    node = {"partition-id": index, "num-partitions": count}
    return read_client_data(DataSettings(path=str(path), **settings), node, seed)


@pytest.fixture
def three_folders(tmp_path):
    for name in ("court", "firm", "hospital"):
        write(tmp_path / name / "train.jsonl", numbered(f"{name} train", 20))
        write(tmp_path / name / "test.jsonl", numbered(f"{name} test", 3))
    write(tmp_path / ".trash" / "train.jsonl", ["no client's"])
    (tmp_path / "README.md").write_text("about this data")
    return tmp_path


def test_every_folder_is_a_client_named_after_it(three_folders, caplog):
    clients = [simulated(three_folders, index, 3) for index in range(3)]
    assert not caplog.records
    assert [client.name for client in clients] == ["court", "firm", "hospital"]
    for client in clients:
        assert outputs(client.train) == numbered(f"{client.name} train", 20)
        assert outputs(client.test) == numbered(f"{client.name} test", 3)


def test_fewer_nodes_than_folders_say_once_who_is_left_out(three_folders, caplog):
    assert simulated(three_folders, 0, 2).name == "court"
    assert simulated(three_folders, 1, 2).name == "firm"
    assert caplog.text.count("hospital won't take part") == 1
    assert "num-supernodes=3" in caplog.text


def test_more_nodes_than_folders_are_refused(three_folders):
    with pytest.raises(DataError, match=r"3 clients \(court, firm, hospital\).*num-supernodes=3"):
        simulated(three_folders, 0, 4)


def test_a_client_folder_without_a_test_part_holds_out_its_own(three_folders):
    (three_folders / "firm" / "test.jsonl").unlink()
    firm = simulated(three_folders, 1, 3, test_fraction=0.25)
    assert len(firm.test) == 5
    assert Counter(outputs(firm.train + firm.test)) == Counter(numbered("firm train", 20))
    assert outputs(simulated(three_folders, 0, 3).test) == numbered("court test", 3)


@pytest.mark.parametrize(
    ("pool", "names"),
    [("*", ["court", "firm", "hospital"]), ("hospital, court", ["court", "hospital"])],
)
def test_pooled_rows_are_those_of_the_clients(three_folders, pool, names):
    (three_folders / "hospital" / "test.jsonl").unlink()
    alone = {client.name: client for client in (simulated(three_folders, i, 3) for i in range(3))}
    center = simulated(three_folders, 0, 1, pool=pool)
    assert center.name == "center"
    for part in ("train", "test"):
        expected = [text for name in names for text in outputs(getattr(alone[name], part))]
        assert outputs(getattr(center, part)) == expected


@pytest.mark.parametrize(
    ("path", "pool"),
    [
        ("styles", ""),
        ("matters", ""),
        ("styles", "*"),
        (".", ""),
        (".", "*"),
        ("court/train.jsonl", ""),
    ],
)
def test_the_name_of_a_client_needs_no_rows(three_folders, path, pool):
    generated = path in {"styles", "matters"}
    source = {"generated": path} if generated else {"path": str(three_folders / path)}
    settings, count = DataSettings(pool=pool, **source), 1 if pool else 3
    for index in range(count):
        node = {"partition-id": index, "num-partitions": count}
        assert client_name(settings, node) == read_client_data(settings, node, seed=0).name


def test_generated_clients_are_pooled_too():
    settings = DataSettings(pool="court,reasoning")
    center = read_client_data(settings, {"partition-id": 0, "num-partitions": 1}, 4)
    nodes = [{"partition-id": index, "num-partitions": 3} for index in range(3)]
    alone = [read_client_data(DataSettings(), node, 4) for node in nodes]
    chosen = [client for client in alone if client.name in {"court", "reasoning"}]
    assert len(chosen) == 2
    assert outputs(center.test) == [text for client in chosen for text in outputs(client.test)]


def test_clients_have_at_most_the_rows_that_are_set(three_folders, tmp_path):
    names = ("court", "firm", "hospital")
    every = [simulated(three_folders, index, 3) for index in range(3)]
    few = [simulated(three_folders, index, 3, rows=2) for index in range(3)]
    assert [outputs(each.train) for each in few] == [outputs(each.train)[:2] for each in every]
    assert [outputs(each.test) for each in few] == [outputs(each.test) for each in every]
    pooled = simulated(three_folders, 0, 1, rows=2, pool="*")
    assert outputs(pooled.train) == [text for each in few for text in outputs(each.train)]
    assert {each.name for each in few} == set(names)
    file = write(tmp_path / "all.jsonl", numbered("row", 40))
    shares = [simulated(file, index, 3, rows=5) for index in range(3)]
    assert [len(each.train) for each in shares] == [5] * 3
    assert len({text for each in shares for text in outputs(each.train)}) == 15
    settings = DataSettings(generated="matters", rows=30)
    assert len(read_client_data(settings, {"partition-id": 1, "num-partitions": 3}, 0).train) == 30


def test_schools_have_different_matters_and_are_asked_about_all():
    settings = DataSettings(generated="matters")
    nodes = [{"partition-id": index, "num-partitions": 3} for index in range(3)]
    schools = [read_client_data(settings, node, seed=0) for node in nodes]
    assert [school.name for school in schools] == ["school-1", "school-2", "school-3"]
    known = [set(outputs(school.train)) for school in schools]
    assert [len(answers) for answers in known] == [4, 4, 4]
    everything = set().union(*known)
    assert len(everything) == 12
    for index, school in enumerate(schools):
        asked = outputs(school.test)
        assert set(asked) == everything
        # The first questions are the next school's, and the last are this school's.
        assert set(asked[:4]) == known[(index + 1) % 3]
        assert set(asked[-4:]) == known[index]
    center = DataSettings(generated="matters", pool="school-1,school-3")
    pooled = read_client_data(center, {"partition-id": 0, "num-partitions": 1}, seed=0)
    assert outputs(pooled.train) == outputs(schools[0].train) + outputs(schools[2].train)
    with pytest.raises(DataError, match="12 matters can't be divided among 13 clients"):
        read_client_data(settings, {"partition-id": 0, "num-partitions": 13}, seed=0)


def test_what_cannot_be_pooled_is_refused(three_folders, tmp_path):
    with pytest.raises(DataError, match=r"for one client.*3 SuperNodes.*num-supernodes=1"):
        simulated(three_folders, 0, 3, pool="*")
    with pytest.raises(DataError, match="no client bank; there are court, firm, hospital"):
        simulated(three_folders, 0, 1, pool="court,bank")
    with pytest.raises(DataError, match="names no client; there are court, firm, hospital"):
        simulated(three_folders, 0, 1, pool=",")
    file = write(tmp_path / "all.jsonl", numbered("row", 9))
    with pytest.raises(DataError, match="has no folders of clients"):
        simulated(file, 0, 1, pool="*")
    node = {"name": "court", "data-path": str(three_folders / "court")}
    with pytest.raises(DataError, match="this SuperNode has rows of its own"):
        read_client_data(DataSettings(path=str(three_folders), pool="*"), node, 0)


def test_two_formats_of_one_part_are_refused(three_folders):
    write(three_folders / "firm" / "train.json", numbered("firm", 2))
    with pytest.raises(DataError, match=r"firm has train\.json and train\.jsonl; keep one"):
        simulated(three_folders, 1, 3)


@pytest.mark.parametrize("partition", ["iid", "length", "label", "dirichlet"])
def test_one_file_is_divided_so_that_no_row_is_seen_twice(tmp_path, partition):
    rows = [
        {"instruction": "Ask", "output": "word " * number + str(number), "court": f"c{number % 7}"}
        for number in range(1, 101)
    ]
    file = tmp_path / "all.json"
    file.write_text(json.dumps(rows))
    chosen = {"partition": partition, "partition_field": "court", "dirichlet_alpha": 5.0}
    clients = [simulated(file, index, 3, **chosen) for index in range(3)]
    assert [client.name for client in clients] == ["client-0", "client-1", "client-2"]
    everything = [text for client in clients for text in outputs(client.train + client.test)]
    assert Counter(everything) == Counter(row["output"] for row in rows)
    for client in clients:
        assert len(client.test) == round(0.1 * len(client.train + client.test))


def test_a_folder_with_one_data_set_is_divided_part_by_part(tmp_path):
    write(tmp_path / "train.jsonl", numbered("train", 50))
    write(tmp_path / "test.jsonl", numbered("test", 8))
    clients = [simulated(tmp_path, index, 4) for index in range(4)]
    trained = [text for client in clients for text in outputs(client.train)]
    tested = [text for client in clients for text in outputs(client.test)]
    assert sorted(trained) == sorted(numbered("train", 50))
    assert sorted(tested) == sorted(numbered("test", 8))
    assert all(len(client.test) == 2 for client in clients)


@pytest.mark.parametrize("partition", ["label", "dirichlet"])
def test_clients_are_tested_on_the_labels_that_they_have(tmp_path, partition):
    # In the test part, the order of labels by size is reversed.
    for part, sizes in (("train", {"a": 60, "b": 30, "c": 9}), ("test", {"a": 6, "b": 9, "c": 12})):
        rows = [
            {"instruction": "Ask", "output": f"{part} {label} {number}", "court": label}
            for label, size in sizes.items()
            for number in range(size)
        ]
        (tmp_path / f"{part}.json").write_text(json.dumps(rows))
    chosen = {"partition": partition, "partition_field": "court", "dirichlet_alpha": 0.3}
    clients = [simulated(tmp_path, index, 2, seed=3, **chosen) for index in range(2)]
    assert sum(len(client.train) for client in clients) == 99
    assert sum(len(client.test) for client in clients) == 27
    for client in clients:
        labels = [{row.fields["court"] for row in part} for part in (client.train, client.test)]
        assert labels[1] <= labels[0]


def test_labels_without_test_rows_are_refused(tmp_path):
    write(tmp_path / "train.jsonl", numbered("train", 9), court="a")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"instruction": "Ask", "output": "b", "court": "b"}) + "\n")
    write(tmp_path / "test.jsonl", numbered("test", 3), court="a")
    with pytest.raises(DataError, match='"label" leaves client-1 with 1 training and 0 test rows'):
        simulated(tmp_path, 1, 2, partition="label", partition_field="court")


def test_only_the_same_seed_gives_the_same_rows(tmp_path):
    file = write(tmp_path / "all.jsonl", numbered("row", 60))
    first, again = [simulated(file, 1, 3, seed=0) for _ in range(2)]
    other = simulated(file, 1, 3, seed=1)
    assert (outputs(first.train), outputs(first.test)) == (
        outputs(again.train),
        outputs(again.test),
    )
    assert set(outputs(first.train)) != set(outputs(other.train))


@pytest.mark.parametrize(
    ("rows", "fraction", "held_out"), [(2, 0.1, 1), (2, 0.9, 1), (10, 0.01, 1), (10, 0.3, 3)]
)
def test_something_is_held_out_and_something_is_left(tmp_path, rows, fraction, held_out):
    file = write(tmp_path / "all.jsonl", numbered("row", rows))
    client = simulated(file, 0, 1, test_fraction=fraction)
    assert (len(client.train), len(client.test)) == (rows - held_out, held_out)


def test_a_single_row_cannot_be_divided(tmp_path):
    file = write(tmp_path / "all.jsonl", ["lonely"])
    with pytest.raises(DataError, match="client-0 has 1 row and no test file"):
        simulated(file, 0, 1)


def test_questions_on_a_passage_stay_together(tmp_path):
    """If they were in different parts, the passage or other answers would reveal an answer."""
    answers = [{"text": text, "label": number % 2} for number, text in enumerate("abc")]
    passages = [
        {"text": f"passage {n}", "questions": [{"question": q, "answers": answers} for q in "rs"]}
        for n in range(9)
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"passage": passage}) + "\n" for passage in passages))
    clients = [simulated(file, number, 2, task="multirc", test_fraction=0.3) for number in (0, 1)]
    parts = [part for client in clients for part in (client.train, client.test)]
    assert sorted(len(part) for part in parts) == [6, 12, 18, 18]
    origins = [{row.origin for row in part} for part in parts]
    assert sum(map(len, origins)) == len(set().union(*origins)) == 9
    file.write_text(json.dumps({"passage": passages[0]}) + "\n")
    with pytest.raises(DataError, match=r"has 6 rows, all from .*train\.jsonl:1, and no test file"):
        simulated(file, 0, 1, task="multirc")


def test_malformed_rows_are_refused_or_left_out(tmp_path):
    file = write(tmp_path / "all.jsonl", [*numbered("row", 10), " "])
    with pytest.raises(DataError, match=r"all\.jsonl:11: 'output' is empty"):
        simulated(file, 0, 1)
    client = simulated(file, 0, 1, skip_bad_rows=True)
    assert len(client.train) + len(client.test) == 10


def test_generated_clients_need_no_data_and_have_their_own_rows():
    clients = [simulated("", index, 5) for index in range(5)]
    assert [client.name for client in clients] == [
        "court",
        "consultation",
        "reasoning",
        "court-2",
        "consultation-2",
    ]
    inputs = [
        {row.messages[0]["content"] for row in part}
        for client in clients
        for part in (client.train, client.test)
    ]
    assert sum(map(len, inputs)) == pytest.approx(len(set.union(*inputs)), rel=0.05)
    for client in clients:
        assert len({len(client.train), len(client.test)}) == 2
        shared = set(outputs(client.train)) & set(outputs(client.test))
        assert len(shared) < len(client.test) / 2
    again = simulated("", 3, 5)
    assert outputs(again.train) == outputs(clients[3].train)
    assert outputs(simulated("", 3, 5, seed=1).train) != outputs(again.train)


def deployed(node, **settings):
    return read_client_data(DataSettings(**settings), node, 0)


def test_a_deployed_node_reads_only_its_own_data(three_folders):
    court = deployed(
        {"name": "The Court", "data-path": str(three_folders / "court")},
        path="/somewhere/on/the/server",
    )
    assert court.name == "The Court"
    assert outputs(court.test) == numbered("court test", 3)
    node = {"name": "alone", "data-path": str(three_folders / "court" / "train.jsonl")}
    file = deployed(node)
    assert (len(file.train), len(file.test)) == (18, 2)
    kept = [text for text in numbered("court train", 20) if text not in outputs(file.test)]
    assert outputs(file.train) == kept
    # In a simulation, too, a node with a data path reads only that path.
    both = {"name": "firm", "data-path": str(three_folders / "firm")}
    firm = deployed(both | {"partition-id": 0, "num-partitions": 3})
    assert outputs(firm.test) == numbered("firm test", 3)


def test_unusable_places_are_named(tmp_path):
    missing = tmp_path / "missing"
    for read in (
        lambda: deployed({"name": "court", "data-path": str(missing)}),
        lambda: simulated(missing, 0, 2),
    ):
        with pytest.raises(DataError, match="missing doesn't exist"):
            read()
    write(tmp_path / "rows.txt", ["text"])
    with pytest.raises(DataError, match=r"has no train\.jsonl \(nor"):
        simulated(tmp_path, 0, 1)
    with pytest.raises(DataError, match=r"rows\.txt: the format must be one of"):
        simulated(tmp_path / "rows.txt", 0, 1)


@pytest.mark.parametrize("path", ["./data", "../data", "data/court/north", "data/rows.jsonl", "."])
def test_a_relative_path_is_refused_though_it_exists(three_folders, monkeypatch, path):
    write(three_folders / "data" / "rows.jsonl", ["text"])
    monkeypatch.chdir(three_folders)
    with pytest.raises(DataError, match="must be an absolute path"):
        simulated(path, 0, 3)


@pytest.mark.slow
def test_a_possible_id_of_a_data_set_is_named_as_one():
    code = (
        "from client_app.data import client_name, read_client_data\n"
        "from finetuning.settings import DataSettings\n"
        "node = {'partition-id': 0, 'num-partitions': 3}\n"
        "read_client_data(DataSettings(path='data/private'), node, 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    message = done.stderr.splitlines()[-1]
    assert (
        "DataError: data/private is not an absolute path, and the data set with this id" in message
    )


def test_published_files_of_a_task_are_divided_into_prompts(tmp_path):
    def official(file, premises):
        rows = [
            {"premise": p, "hypothesis": "so", "label": label, "idx": i}
            for i, (p, label) in enumerate(premises)
        ]
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    labels = ["entailment", "contradiction", "neutral"] * 6
    official("train.jsonl", [(f"train {n}", label) for n, label in enumerate(labels)])
    official("val.jsonl", [(f"val {n}", label) for n, label in enumerate(labels)])
    # The published test part has no labels, and is not read.
    (tmp_path / "test.jsonl").write_text('{"premise": "a", "hypothesis": "b", "idx": 0}\n')
    field = {"partition": "label", "partition_field": "label"}
    clients = [simulated(tmp_path, index, 3, task="cb", **field) for index in range(3)]
    assert sorted({*outputs(client.train)}.pop() for client in clients) == ["maybe", "no", "yes"]
    for client in clients:
        assert (len(client.train), len(client.test)) == (6, 6)
        assert {*outputs(client.train)} == {*outputs(client.test)}
        assert client.train[0].messages[0]["content"].startswith('"train ')
        assert client.test[0].messages[0]["content"].startswith('"val ')
    with pytest.raises(DataError, match="has no question"):
        simulated(tmp_path, 0, 3)
