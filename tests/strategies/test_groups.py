"""Which groups of masked sums are complete, and what the others' members are told."""

import pytest

from federation.flower_internals import HttpGrid
from federation.run_config import ConfigError, parse_run_config
from federation.sums.announcement import NO_MEMBERS, Announcement, Statement
from strategies.groups import complete_groups, groups_of, require_members
from tests.sums import sign_members

GROUPS = [["a", "b", "c"], ["d", "e", "f"]]


def announce(*names, rows=10):
    about = {"lineage": "run", "members": NO_MEMBERS, "key": "0" * 64, "rows": rows}
    flags = {"only": True, "evaluates": True, "importance": True}
    return {n: Announcement.sign(Statement(name=n, **about, **flags), None) for n in names}


def test_a_group_needs_all_members():
    complete, absent = complete_groups(GROUPS, set("abcdex"), announce(*"abcde"), {})
    assert complete.keys() == set("abc") and complete["a"] is complete["c"]
    assert absent == {
        "d": "its group is incomplete: f can't take part",
        "e": "its group is incomplete: f can't take part",
        "x": "it is in no group of sums.members",
    }


@pytest.mark.parametrize("announced", ["abc", "abcdef"])
def test_groups_that_were_not_drawn_are_not_missing(announced):
    complete, absent = complete_groups(GROUPS, set("abcdef"), announce(*announced), {})
    assert complete.keys() == set(announced) and not absent


def test_who_announces_more_rows_than_agreed_takes_no_part():
    complete, absent = complete_groups(
        GROUPS, set("abcdef"), announce(*"abcdef"), {"b": 9, "d": 10}
    )
    assert complete.keys() == set("def")
    assert absent["b"] == "it announces more than the 9 rows that are agreed on"
    assert absent["a"] == "its group is incomplete: b can't take part"


def test_groups_come_from_the_list_or_are_formed_by_name(tmp_path):
    config = parse_run_config({"sums.enabled": True, "min-nodes": 3})
    names = [f"c{number:02}" for number in range(7)]
    assert groups_of(config, names) == [names]
    many = groups_of(config, [f"c{number:02}" for number in range(11)])
    assert sorted(map(len, many)) == [5, 6]
    file = sign_members(tmp_path, ["b", "a", "c"])
    listed = parse_run_config({"sums.enabled": True, "min-nodes": 3, "sums.members": str(file)})
    assert groups_of(listed, names) == [["a", "b", "c"]]


def test_a_deployment_needs_the_list():
    grid = HttpGrid.__new__(HttpGrid)  # not connected to a SuperLink
    config = parse_run_config({"sums.enabled": True, "min-nodes": 3})
    with pytest.raises(ConfigError, match=r"needs sums\.members in a deployment"):
        require_members(config, grid)
    require_members(parse_run_config({}), grid)
