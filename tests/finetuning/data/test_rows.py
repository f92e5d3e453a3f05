"""Reading rows: the same result for every format, and a message for every kind of error."""

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.data.formats import DataError, is_data_set_id
from finetuning.data.rows import print_left_out, read_rows

RECORDS = [
    {"instruction": "Answer.", "input": "Is it void?", "output": "Yes.", "court": "north"},
    {"instruction": "Say when", "input": "", "output": "2020-01-01", "court": "north"},
    {"instruction": 'Say "no",\nplease', "input": "", "output": " NA ", "court": "south"},
    {"instruction": "合同 是否 有效?", "input": "原告:张三", "output": "无效。\n", "court": "001"},
    {"instruction": "Count", "input": "to 42", "output": "42", "court": "null"},
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Is it void?"},
    {"role": "assistant", "content": "It is."},
]


def write(path: Path, records: list[dict]) -> Path:
    """Write records in the format that the file's suffix specifies."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def lines_of(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    )
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_rows(path)
    return str(error.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_every_format_reads_the_same(tmp_path, name):
    rows = read_rows(write(tmp_path / name, RECORDS))
    assert [row.fields for row in rows] == RECORDS
    assert [row.messages[-1]["content"] for row in rows] == [r["output"] for r in RECORDS]
    assert rows[0].messages[0] == {"role": "user", "content": "Answer.\nIs it void?"}
    assert rows[1].messages[0] == {"role": "user", "content": "Say when"}
    assert len({row.origin for row in rows}) == len(rows)
    assert all(str(tmp_path / name) in row.origin for row in rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_both_forms_may_stand_in_one_file(tmp_path, name):
    both = [
        {"messages": CONVERSATION, "instruction": None, "output": None},
        {"messages": None, "instruction": "Ask", "output": "Answer"},
    ]
    rows = read_rows(write(tmp_path / name, both))
    assert list(rows[0].messages) == CONVERSATION
    assert len(rows[1].messages) == 2


def test_json_lines_under_the_other_suffix(tmp_path):
    path = lines_of(tmp_path / "rows.json", *[json.dumps(record) for record in RECORDS])
    assert [row.fields for row in read_rows(path)] == RECORDS
    path = lines_of(tmp_path / "one.json", json.dumps(RECORDS[0]))
    assert [row.fields for row in read_rows(path)] == RECORDS[:1]


def test_what_windows_programs_write_is_read(tmp_path):
    lines = [json.dumps(record, ensure_ascii=False) + "\r\n" for record in RECORDS]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "".join(lines).encode() + b"\r\n")
    assert [row.fields for row in read_rows(path)] == RECORDS
    path = tmp_path / "rows.csv"
    for before in ("", "sep=,\r\n"):
        text = f"\ufeff{before}\r\nInstruction, input,output\r\n,,\r\nAsk,,Answer\r\n,,\r\n\r\n"
        path.write_bytes(text.encode())
        assert [row.messages[1]["content"] for row in read_rows(path)] == ["Answer"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"instruction;output\nsecret;b\n", "must be separated by commas"),
        (b"sep=;\ninstruction;output\nsecret;b\n", "must be separated by commas"),
        (
            b"output,note,note,output\na,,,secret\n",
            "two columns of the same name: 'note', 'output'",
        ),
        ("instruction,output\nsecret,b\n".encode("utf-16"), "is not UTF-8"),
    ],
)
def test_tables_as_spreadsheets_may_write_them_are_refused(tmp_path, content, reason):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        read_rows(tmp_path / "rows.csv")
    assert "secret" not in str(error.value)


def test_separators_of_unicode_are_not_line_ends(tmp_path):
    record = {"instruction": "a\u2028b\x85c", "output": "d\u2029e\x0bf"}
    path = lines_of(tmp_path / "rows.jsonl", json.dumps(record, ensure_ascii=False))
    assert read_rows(path)[0].fields == record


@pytest.mark.parametrize("name", ["rows.NDJSON", "Rows.jsonl.gz", "rows.json.GZ", "rows.csv.gz"])
def test_files_may_be_compressed_and_their_names_in_upper_case(tmp_path, name):
    plain = write(tmp_path / name.lower().replace("ndjson", "jsonl").removesuffix(".gz"), RECORDS)
    content = plain.read_bytes()
    plain.unlink()
    is_zipped = name.lower().endswith(".gz")
    (tmp_path / name).write_bytes(gzip.compress(content) if is_zipped else content)
    rows = read_rows(tmp_path / name)
    assert [row.fields for row in rows] == RECORDS
    assert all(str(tmp_path / name) in row.origin for row in rows)


def test_long_cells_and_unusual_folder_names(tmp_path):
    folder = tmp_path / "court [2024] {a,b} *"
    folder.mkdir()
    long = [{"instruction": "Sum up", "output": "word " * 60_000}]
    for name in ("rows.csv", "rows.parquet", "rows.jsonl", "rows.json"):
        assert read_rows(write(folder / name, long))[0].fields == long[0]


MALFORMED = [
    ('{"instruction": "secret", "output": "x"', "not JSON"),
    (b'{"instruction": "secret\xff", "output": "x"}\n', "not UTF-8"),
    ('{"instruction": "secret", "output": "\\ud83d"}', "'output' has a lone surrogate"),
    ('["secret"]', "expected an object, found list"),
    ("null", "found NoneType"),
    ('{"instruction": "secret"}', "has no answer (output, completion"),
    ('{"frage": "secret", "antwort": "x"}', "can name other columns: found 'frage', 'antwort'"),
    ('{"instruction": "secret", "output": null}', "found 'instruction'"),
    ('{"output": "secret", "instruction": "x", "output": "y"}', "has a key twice: 'output'"),
    ('{"instruction": "secret", "output": " \\n"}', "'output' is empty"),
    ('{"instruction": " ", "output": "secret"}', "'instruction' is empty"),
    ('{"instruction": "secret", "output": 5}', "'output' must be text, found int"),
    ('{"instruction": "secret", "output": "x", "input": ["y"]}', "'input' must be text"),
    ('{"messages": "secret"}', "must be a list of turns"),
    ('{"messages": []}', "found 'messages'"),
    ('{"messages": [5]}', "turn 1 of 'messages' needs the role"),
    ('{"messages": [{"role": "tool", "content": "secret"}]}', "system, user or assistant"),
    ('{"messages": [{"role": ["user"], "content": "secret"}]}', "system, user or assistant"),
    ('{"messages": [{"role": "user", "content": null}]}', "needs text as 'content'"),
    ('{"messages": [{"role": "user", "content": "secret"}]}', "no assistant turn"),
    ('{"messages": [{"role": "assistant", "content": "secret"}]}', "starts with an assistant turn"),
    (
        '{"messages": [{"role": "user", "content": "secret"},'
        ' {"role": "assistant", "content": " "}]}',
        "turn 2 of 'messages' is an empty answer",
    ),
    (
        '{"messages": [{"role": "user", "content": "secret \\udc00"},'
        ' {"role": "assistant", "content": "x"}]}',
        "turn 1 of 'messages' has a lone surrogate",
    ),
    ("[" * 100_000, "nested too deeply"),
    ("9" * 5_000, "too many digits"),
]


@pytest.mark.parametrize(("line", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_row_is_named_with_its_reason(tmp_path, line, reason):
    good = json.dumps(RECORDS[0])
    path = lines_of(tmp_path / "rows.jsonl", good, "", line, good)
    message = refusal(path)
    assert f"{path}:3: " in message
    assert reason in message
    assert "1 of 3 rows" in message
    assert "secret" not in message  # logs leave the institution
    assert len(read_rows(path, print_left_out)) == 2


def test_a_message_shows_a_few_of_many_malformed_rows(tmp_path):
    message = refusal(lines_of(tmp_path / "rows.jsonl", *["{}", "[]"] * 500))
    assert len(message.splitlines()) < 30
    assert "1000 of 1000 rows" in message
    assert "and 980 more" in message
    # A single fault, such as that of a header, is one.
    message = refusal(lines_of(tmp_path / "rows.csv", "Export", *["secret,b"] * 99))
    assert "rows.csv:2: has 2 cells, but the header has 1: 'Export'" in message
    assert "all other rows, for the same reason" in message and "rows.csv:3" not in message


def test_skipping_all_rows_is_refused(tmp_path):
    path = lines_of(tmp_path / "rows.jsonl", "{}", "[]")
    with pytest.raises(DataError, match=r"2 of 2 rows.*\n.*rows\.jsonl:1: has no question"):
        read_rows(path, print_left_out)


def test_malformed_rows_of_a_table_are_named_by_line(tmp_path, capsys):
    path = lines_of(
        tmp_path / "rows.csv",
        "instruction,input,output",
        'a,"two',
        'lines",b',
        "a,b",
        "a,b,c,d",
        b"a,b,\xff\n",
        "a,b,",
        'a,"b" b,c',
        "a,b,c",
        'a,"never closed,c',
        "a,b,c",
    )
    message = refusal(path)
    for line, reason in [
        (4, "has 2 cells, but the header has 3"),
        (5, "has 4 cells, but the header has 3"),
        (6, "not UTF-8"),
        (7, "'output' is empty"),
        (8, "not CSV"),
        (10, "not CSV"),
    ]:
        assert f"{path}:{line}: {reason}" in message
    assert "6 of 8 rows" in message and "data.skip-bad-rows" in message
    assert len(read_rows(path, print_left_out)) == 2
    assert capsys.readouterr().out.count("left out: ") == 6


def test_malformed_rows_without_lines_are_named_by_number(tmp_path):
    bad = [RECORDS[0], {"instruction": "a", "output": 5}, {"messages": [{"id": 1}]}, "text"]
    message = refusal(write(tmp_path / "rows.json", bad))
    assert "3 of 4 rows" in message
    for number, reason in [(2, "'output' must be text"), (3, "turn 1"), (4, "found str")]:
        assert f"rows.json, row {number}: " in message
        assert reason in message
    bad = [{"instruction": "a", "output": b"bytes"}, {"instruction": None, "output": b"x"}]
    message = refusal(write(tmp_path / "rows.parquet", bad))
    assert "rows.parquet, row 1: 'output' must be text, found bytes" in message
    assert "rows.parquet, row 2: has no question (" in message


def test_files_that_are_not_what_they_seem(tmp_path):
    for name in ("rows.jsonl", "rows.json", "rows.csv"):
        assert "no rows" in refusal(lines_of(tmp_path / name))
        assert "no rows" in refusal(lines_of(tmp_path / name, "", ""))
    assert "no rows" in refusal(lines_of(tmp_path / "head.csv", "instruction,output"))
    assert "no rows" in refusal(lines_of(tmp_path / "none.json", "[]"))
    for content in (b"", b"PAR1", b"instruction,output\na,b\n"):
        path = lines_of(tmp_path / "rows.parquet", content)
        assert str(path) in refusal(path)
    path = lines_of(tmp_path / "cut.json", '[{"instruction": "a",', '"output": "b"')
    assert f"{path}: not JSON" in refusal(path)
    assert "line 3, column 1" in refusal(path)
    for name in ("other.jsonl", "other.json", "other.csv"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # reading its beginning fails
        assert f"{tmp_path / name} can't be read: Input/output error" in refusal(tmp_path / name)
    assert "is not a file" in refusal(tmp_path / "missing.jsonl")
    assert "is not a file" in refusal(tmp_path)
    message = refusal(lines_of(tmp_path / "rows.txt", json.dumps(RECORDS[0])))
    assert "rows.txt" in message
    assert ".jsonl, .ndjson, .json, .csv, .parquet" in message
    for content in (b"{", gzip.compress(b"{}" * 99)[:-9]):
        path = lines_of(tmp_path / "rows.jsonl.gz", content)
        assert f"{path} can't be read: " in refusal(path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows", {"path": "rows", "split": "train"}),
        ("a/b.c:de", {"path": "a/b.c", "name": "de", "split": "train"}),
        ("a/b:de:sft@v1.0", {"path": "a/b", "name": "de", "split": "sft", "revision": "v1.0"}),
        ("a/b::sft", {"path": "a/b", "split": "sft"}),
        (
            "a/b@refs/convert/parquet",
            {"path": "a/b", "revision": "refs/convert/parquet", "split": "train"},
        ),
    ],
)
def test_ids_name_a_configuration_a_split_and_a_revision(monkeypatch, name, options):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda **own: asked.append(own) or RECORDS)
    assert is_data_set_id(name)
    rows = read_rows(name)
    assert [row.origin for row in rows[:2]] == [f"{name}, row 1", f"{name}, row 2"]
    assert asked == [options | {"streaming": True}]


@pytest.mark.parametrize("name", ["a/b@", "rows/train.jsonl", "rows.csv.gz", "/a/b", "a b"])
def test_paths_and_parts_of_ids_are_not_ids(name):
    assert not is_data_set_id(name)


READ_ALL = """
import sys
from pathlib import Path
from finetuning.data.formats import DataError
from finetuning.data.rows import read_rows
for name in sys.argv[1:]:
    try:
        print(len(read_rows(Path(name))))
    except DataError as error:
        print("refused:", "not a file" not in str(error))
try:
    read_rows("court/private")
except DataError as error:
    print(error)
"""


@pytest.mark.slow
def test_no_private_text_is_left_in_a_cache(tmp_path):
    data, home = tmp_path / "data", tmp_path / "home"
    data.mkdir()
    home.mkdir()
    records = [{"instruction": f"Ask {n}", "output": f"PrivateName{n}"} for n in range(50)]
    files = [
        write(data / f"rows{suffix}", records) for suffix in (".jsonl", ".json", ".csv", ".parquet")
    ]
    places = {
        name: str(home / name)
        for name in ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TMPDIR", "HOME")
    }
    for place in places.values():
        Path(place).mkdir()
    damaged = data / "damaged.parquet"
    damaged.write_bytes(files[-1].read_bytes()[:-30])
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, *files, damaged],
        env=os.environ | places | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    *counts, refused, offline = done.stdout.splitlines()
    assert counts == ["50"] * 4
    assert refused == "refused: True"
    # If a data set's id can't be found, the error shows that it was taken for an id.
    assert offline.startswith(
        "court/private is not an absolute path, and the data set with this id"
    )
    left = [file for file in home.rglob("*") if file.is_file()]
    assert [file for file in left if b"PrivateName" in file.read_bytes()] == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "instruction", "output"]) | st.text(),
            values | st.sampled_from(["user", "assistant", "system"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(
    st.lists(st.binary(max_size=30) | JSON_VALUES.map(json.dumps).map(str.encode), max_size=6),
    st.sampled_from([".jsonl", ".json", ".csv"]),
    st.booleans(),
)
def test_any_bytes_are_read_or_refused(tmp_path_factory, lines, suffix, has_header):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(b"\n".join([b"instruction,output"] * has_header + lines))
    for leave_out in (None, lambda origin, reason: None):
        try:
            rows = read_rows(path, leave_out)
        except DataError as error:
            assert str(path) in str(error)
        else:
            for row in rows:
                answers = [t["content"] for t in row.messages if t["role"] == "assistant"]
                assert row.messages[0]["role"] != "assistant"
                assert answers and all(answer.strip() for answer in answers)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.text(min_size=1), st.text(), st.text(min_size=1)).filter(
            lambda cells: cells[0].strip() and cells[2].strip() and "\r" not in "".join(cells)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_text_comes_back_as_it_was_from_every_format(tmp_path_factory, cells):
    records = [dict(zip(("instruction", "input", "output"), row, strict=True)) for row in cells]
    folder = tmp_path_factory.getbasetemp()
    for suffix in (".jsonl", ".json", ".csv"):
        rows = read_rows(write(folder / f"text{suffix}", records))
        assert [row.fields for row in rows] == records
