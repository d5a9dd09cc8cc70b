from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.tools.devcluster.hosts import foreign_names, marked_hosts, with_hosts, without_hosts

_STATE = Path("/var/lib/state")
_NAMES = {"node1": "10.0.0.11", "node2": "10.0.0.12"}
_MARK = "# slurm-train-devcluster /var/lib/state"
_OURS = f"10.0.0.11\tnode1 {_MARK}\n10.0.0.12\tnode2 {_MARK}\n"


@pytest.mark.parametrize("text", ["", "127.0.0.1 localhost\n", "127.0.0.1 localhost\n# a remark\n\n::1 ip6\n"])
def test_lines_come_and_go_without_touching_others(text):
    added = with_hosts(text, names=_NAMES, state_dir=_STATE)
    assert added == text + _OURS
    assert without_hosts(added) == text


def test_a_missing_last_newline_does_not_join_lines():
    assert with_hosts("127.0.0.1 localhost", names=_NAMES, state_dir=_STATE) == "127.0.0.1 localhost\n" + _OURS


def test_adding_twice_is_adding_once():
    once = with_hosts("127.0.0.1 localhost\n", names=_NAMES, state_dir=_STATE)
    assert with_hosts(once, names=_NAMES, state_dir=_STATE) == once


def test_marked_lines_tell_name_and_state_directory():
    assert marked_hosts("127.0.0.1 localhost\n" + _OURS) == {"node1": _STATE, "node2": _STATE}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("127.0.0.1 localhost\n" + _OURS, []),
        ("10.9.9.9 box node2\n", ["node2"]),
        ("10.9.9.9 box # node2\n", []),
        ("10.9.9.9 node1\n10.9.9.8 node2\n", ["node1", "node2"]),
    ],
)
def test_names_of_somebody_else_are_found(text, taken):
    assert foreign_names(text, names=_NAMES) == taken
