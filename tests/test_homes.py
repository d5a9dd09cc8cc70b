"""Each test runs in exactly one command, and no guarantee is without a quick test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guarantees import GUARANTEES
from tests.homes import HOMES, has_all_quick_tests, home_of, homes_in, without_a_test

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("marks", "own_marks", "home"),
    [
        ([], [], "quick"),
        (["slurm", "distributed"], ["slurm"], "quick"),
        (["full"], [], "full"),
        (["slurm", "campaign"], ["campaign"], "campaign"),
        # Its own mark comes before that of its file.
        (["campaign", "full"], ["campaign"], "campaign"),
    ],
)
def test_a_test_has_the_home_of_its_nearest_mark(marks: list[str], own_marks: list[str], home: str) -> None:
    assert home_of(marks, own_marks) == home


def test_two_homes_are_refused() -> None:
    with pytest.raises(pytest.UsageError, match="full, campaign"):
        home_of(["full", "campaign"], ["full", "campaign"])


@pytest.mark.parametrize(
    ("source", "homes"),
    [
        ("def test_a(): ...", {"quick"}),
        ("pytestmark = pytest.mark.slurm", {"quick"}),
        ("pytestmark = pytest.mark.full", {"full"}),
        ("pytestmark = [pytest.mark.slurm, pytest.mark.full]", {"full"}),
        ("@pytest.mark.campaign\ndef test_a(): ...", {"quick", "campaign"}),
        ("pytestmark = pytest.mark.full\n@pytest.mark.campaign\ndef test_a(): ...", {"full", "campaign"}),
        ("rows = [pytest.param(1, marks=pytest.mark.full)]", {"quick", "full"}),
    ],
)
def test_a_file_is_left_out_only_where_no_test_of_it_has_the_home(source: str, homes: set[str]) -> None:
    assert homes_in(source) == homes


def test_a_guarantee_without_its_test_is_named() -> None:
    guarantees = {
        "order": "tests/a.py::test_order",
        "resume": "tests/b.py::test_resume[2]",
        "stop": "tests/c.py::test_s",
    }
    nodes = ["tests/a.py::test_order[1]", "tests/b.py::test_resume[1]", "tests/c.py::test_s"]
    assert without_a_test(guarantees, nodes) == ["resume (tests/b.py::test_resume[2])"]


def test_each_guarantee_has_a_quick_test(request: pytest.FixtureRequest) -> None:
    """Of part of the tests nothing can be said; see the next test."""
    if has_all_quick_tests(request.config):
        assert without_a_test(GUARANTEES, [item.nodeid for item in request.session.items]) == []


def test_each_guarantee_is_a_test_that_is_there() -> None:
    """Looks at the text, so an edit of part of the tests is seen, too."""
    gone = []
    for test in GUARANTEES.values():
        path, _, name = test.partition("::")
        source = (REPOSITORY / path).read_text(encoding="utf-8")
        if f"def {name.partition('[')[0].rpartition('::')[2]}(" not in source:
            gone.append(test)
    assert gone == []


def test_each_home_has_a_command() -> None:
    commands = "".join((REPOSITORY / path).read_text(encoding="utf-8") for path in ("Makefile", "tests/shards.py"))
    assert [home for home in HOMES if f"--home {home}" not in commands and f"--home={home}" not in commands] == []
