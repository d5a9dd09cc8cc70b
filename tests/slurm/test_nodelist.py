from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.slurm.allocation import NodeListError, compact_nodelist, parse_nodelist, parse_tasks_per_node
from tests.support.refusals import refusal


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a,b", ["a", "b"]),
        ("h[7,3,5]", ["h7", "h3", "h5"]),
        ("a[1],b[2-3]", ["a1", "b2", "b3"]),
        ("rack[1-2]node[3-4]", ["rack1node3", "rack1node4", "rack2node3", "rack2node4"]),
        # With three groups Slurm runs through the first faster than through the second.
        ("a[1-2]b[3-4]c[5-6]", ["a1b3c5", "a1b3c6", "a2b3c5", "a2b3c6", "a1b4c5", "a1b4c6", "a2b4c5", "a2b4c6"]),
        ("n[8-12]", ["n8", "n9", "n10", "n11", "n12"]),
        ("n[08-12]", ["n08", "n09", "n10", "n11", "n12"]),
        ("n[1-010]", [f"n{number}" for number in range(1, 11)]),
        ("n[2-0004]", ["n2", "n3", "n4"]),
        ("n[00-1]", ["n00", "n01"]),
        ("n1,n01,n001", ["n1", "n01", "n001"]),
        ("[1-2]", ["1", "2"]),
        # Text after the last bracket is part of each host.
        ("r[1-2]n[3-4].lan", ["r1n3.lan", "r1n4.lan", "r2n3.lan", "r2n4.lan"]),
        (",a,,b,", ["a", "b"]),
        ("a b\tc\nd", ["a", "b", "c", "d"]),
    ],
)
def test_hosts_come_as_scontrol_prints_them(text: str, hosts: list[str]) -> None:
    assert parse_nodelist(text) == hosts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n[1-2", "unexpected '[' at character 2"),
        ("n[1-2]]", "unexpected ']' at character 7"),
        ("(null)", "unexpected '(' at character 1"),
        ("a;reboot", "unexpected ';' at character 2"),
        ("n[]", "expected a number or a range, found ''"),
        ("n[1-]", "expected a number or a range, found '1-'"),
        ("n[1-2-3]", "expected a number or a range, found '1-2-3'"),
        ("n[\u0661-\u0662]", "expected a number or a range, found '\u0661-\u0662'"),
        ("n[1,3-2]", "range '3-2' runs backwards or has more than 65536 hosts"),
        ("n[1-999]m[1-999]", "more than 65536 hosts"),
        ("n[9999999999999999999]", "number too large in '9999999999999999999'"),
    ],
)
def test_a_malformed_list_is_refused_naming_the_part(text: str, problem: str) -> None:
    assert refusal(NodeListError, parse_nodelist, text).message == f"{text!r} is not a Slurm list: {problem}"


def test_the_largest_range_of_slurm_is_accepted() -> None:
    assert len(parse_nodelist("n[0-65535]")) == 65536


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("5,1", [5, 1]), ("8(x4)", [8] * 4), ("2,4,2,4", [2, 4, 2, 4]), ("0", [0])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert parse_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text", ["", "2(x3", "2(x0)", "x", "2,,1", "2(3)", "-1", "1 ", "2(x99999999)", "\u0662", "9" * 40]
)
def test_malformed_task_counts_are_refused(text: str) -> None:
    with pytest.raises(NodeListError, match="is not a Slurm list"):
        parse_tasks_per_node(text)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ([], ""),
        (["n8", "n9", "n10", "m1"], "n[8-10],m1"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n9", "n010"], "n9,n010"),
        (["rack1-n1", "rack1-n2", "rack2-n1"], "rack1-n[1-2],rack2-n1"),
        (["a", "a"], "a,a"),
    ],
)
def test_hosts_are_written_in_the_compact_form(hosts: list[str], text: str) -> None:
    assert compact_nodelist(hosts) == text


@settings(deadline=None)
@given(st.lists(st.from_regex(r"[a-z]{1,2}(-[a-z])?[0-9]{0,3}", fullmatch=True), max_size=12))
def test_the_compact_form_gives_the_hosts_back(hosts: list[str]) -> None:
    assert parse_nodelist(compact_nodelist(hosts)) == hosts
