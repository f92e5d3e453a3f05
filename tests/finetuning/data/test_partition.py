"""Every kind of partition covers the data once and is skewed in its own way."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.data.formats import DataError
from finetuning.data.partition import partition
from finetuning.data.rows import Row
from finetuning.settings import DataSettings

LABELS = st.sampled_from(["north", "south", "east", "west", "合同", "5"])
KINDS = ["iid", "label", "length", "dirichlet"]


def rows_of(labels, lengths=None):
    lengths = lengths or [1] * len(labels)
    return [
        Row(
            ({"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * length}),
            f"rows.jsonl:{number}",
            {"court": label},
        )
        for number, (label, length) in enumerate(zip(labels, lengths, strict=True), start=1)
    ]


def settings_of(kind, alpha=0.5, field="court"):
    return DataSettings(partition=kind, partition_field=field, dirichlet_alpha=alpha)


def label_counts(part):
    return Counter(row.fields["court"] for row in part)


@settings(max_examples=200)
@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(LABELS, st.integers(1, 50)), min_size=1, max_size=60),
    st.integers(1, 6),
    st.integers(0, 2**40),
    st.sampled_from([0.01, 0.5, 1.0, 1e6]),
)
def test_parts_are_a_disjoint_cover_and_each_has_something(kind, data, parts, seed, alpha):
    rows = rows_of([label for label, _ in data], [length for _, length in data])
    try:
        divided = partition(rows, parts, settings_of(kind, alpha), seed)
    except DataError as error:
        enough = len(rows) >= parts
        assert not enough or kind in {"label", "dirichlet"}
        if kind == "label" and enough:
            assert len({label for label, _ in data}) < parts
        assert str(parts) in str(error)
        return
    assert len(divided) == parts
    assert all(divided)
    assert sorted(row.origin for part in divided for row in part) == sorted(
        row.origin for row in rows
    )
    assert divided == partition(rows, parts, settings_of(kind, alpha), seed)


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_another_seed_gives_another_partition(kind):
    rows = rows_of(["north", "south"] * 50)
    divided = [partition(rows, 4, settings_of(kind), seed) for seed in (0, 1)]
    assert divided[0] != divided[1]


def test_iid_parts_are_equally_large_and_alike():
    rows = rows_of((["north"] * 3 + ["south"]) * 251, list(range(1, 1005)))
    divided = partition(rows, 5, settings_of("iid"), 0)
    assert sorted(map(len, divided)) == [200, 201, 201, 201, 201]
    for part in divided:
        assert label_counts(part)["north"] / len(part) == pytest.approx(0.75, abs=0.1)
        mean = sum(len(row.messages[1]["content"]) for row in part) / len(part)
        assert mean == pytest.approx(502, abs=60)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=4, max_size=60), st.integers(1, 4))
def test_parts_by_length_do_not_overlap(lengths, parts):
    divided = partition(rows_of(["north"] * len(lengths), lengths), parts, settings_of("length"), 3)
    of_parts = [[len(row.messages[1]["content"]) for row in part] for part in divided]
    for shorter, longer in pairwise(of_parts):
        assert max(shorter) <= min(longer)
    assert max(map(len, of_parts)) - min(map(len, of_parts)) <= 1


@settings(max_examples=100)
@given(st.lists(LABELS, min_size=3, max_size=60), st.integers(1, 3))
def test_parts_by_label_share_no_label(labels, parts):
    if len(set(labels)) < parts:
        return
    owners = [
        set(label_counts(part))
        for part in partition(rows_of(labels), parts, settings_of("label"), 0)
    ]
    assert sum(map(len, owners)) == len(set(labels))


def test_parts_by_label_are_balanced():
    labels = ["a"] * 60 + ["b"] * 30 + ["c"] * 20 + ["d"] * 10
    divided = partition(rows_of(labels), 2, settings_of("label"), 0)
    assert [set(label_counts(part)) for part in divided] == [{"a"}, {"b", "c", "d"}]


def test_labels_are_compared_as_a_table_writes_them():
    mixed = rows_of([1, "1", 2, "2", True, 2.5, " 1"])
    divided = partition(mixed, 5, settings_of("label"), 0)
    assert sorted(sorted(str(row.fields["court"]) for row in part) for part in divided) == [
        [" 1"],
        ["1", "1"],
        ["2", "2"],
        ["2.5"],
        ["True"],
    ]


def test_dirichlet_goes_from_skewed_to_even():
    rows = rows_of(["north", "south", "east", "west"] * 250)

    def skew(alpha):
        """Return the mean share of a part's most frequent label, over several partitions."""
        shares = [
            max(label_counts(part).values()) / len(part)
            for seed in range(5)
            for part in partition(rows, 4, settings_of("dirichlet", alpha), seed)
        ]
        return sum(shares) / len(shares)

    skews = [skew(alpha) for alpha in (0.05, 0.5, 5.0, 1e6)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.7
    assert skews[-1] == pytest.approx(0.25, abs=0.01)


def test_too_few_rows_or_labels_are_refused():
    with pytest.raises(DataError, match="3 rows can't be divided among 4 clients"):
        partition(rows_of(["north"] * 3), 4, settings_of("iid"), 0)
    with pytest.raises(DataError, match="2 labels can't be divided among 3 clients"):
        partition(rows_of(["north", "south"] * 5), 3, settings_of("label"), 0)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*'judge'.*data\.partition-field"):
        partition(rows_of(["north"] * 3), 2, settings_of("label", field="judge"), 0)
    for nothing in (None, ""):  # an empty cell of JSON and of CSV
        with pytest.raises(DataError, match=r"rows\.jsonl:2: .*'court'"):
            partition(rows_of(["north", nothing, "south"]), 2, settings_of("label"), 0)
    with pytest.raises(DataError, match=r"dirichlet-alpha = 1e-09.* raise data.dirichlet-alpha"):
        partition(rows_of(["north"] * 30), 3, settings_of("dirichlet", 1e-9), 0)
