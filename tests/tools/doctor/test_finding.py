from __future__ import annotations

import pytest

from slurm_train.tools.doctor.finding import CODES, Finding, Level, errors_in, link, merge, read_finding


def finding(node: str = "node3", *, level: Level = "error", seen: str = "is full", blames: bool = True) -> Finding:
    return Finding(code="DISK_FULL", level=level, seen=seen, todo="free some", node=node, blames_node=blames)


def test_a_finding_is_one_line_with_its_code_and_a_link() -> None:
    assert finding().line == "DISK_FULL node3: is full; free some (docs/troubleshooting.md#disk_full)"
    assert finding(node="").short == "DISK_FULL: is full"


def test_a_code_that_is_not_in_the_registry_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="NO_SUCH_CODE"):
        Finding(code="NO_SUCH_CODE", level="error", seen="", todo="")


def test_a_finding_survives_json() -> None:
    assert read_finding(finding().as_json()) == finding()
    assert finding().as_json()["line"] == finding().line


NODES = ("node1", "node2", "node3", "node4", "node5")


@pytest.mark.parametrize(
    ("names", "node", "blames"),
    [
        (["node3"], "node3", True),
        (["node3", "node4"], "node3, node4", True),
        (["node3", "node4", "node5"], "node3, node4, node5", False),
        (list(NODES), "", False),
    ],
)
def test_what_several_nodes_have_is_said_once(names: list[str], node: str, blames: bool) -> None:
    (merged,) = merge([finding(name) for name in names], nodes=NODES)
    assert (merged.node, merged.blames_node) == (node, blames)


def test_other_words_are_another_finding() -> None:
    assert len(merge([finding("node1"), finding("node2", seen="has 3 MiB left")], nodes=NODES)) == 2


def test_errors_come_first_and_are_told_from_the_rest() -> None:
    found = merge([finding(level="note"), finding(level="warning"), finding(level="error")], nodes=NODES)
    assert [one.level for one in found] == ["error", "warning", "note"]
    assert [one.level for one in errors_in(found)] == ["error"]


def test_codes_are_names_that_a_heading_can_carry() -> None:
    assert all(code == code.upper() and code.replace("_", "").isalpha() for code in CODES)
    assert link("FS_STALE") == "docs/troubleshooting.md#fs_stale"
