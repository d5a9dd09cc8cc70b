"""Which command runs a test: each test has exactly one home.

`quick` is `make test`, `full` is what `make test-full` adds, and `campaign` is what the shards of `make test-returns`
run. A test without a mark is quick; its own mark counts before that of its file. A collection ends with an error where
a test has two marks of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

MARKED = ("full", "campaign")
HOMES = ("quick", *MARKED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--home`; without it and without `-m`, all tests but campaigns are selected."""
    parser.addoption("--home", choices=HOMES, help="run the tests of this home alone")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files that have no test of the wanted home, before they are imported."""
    home = config.getoption("--home")
    if home is None or not collection_path.name.startswith("test_"):
        return None
    is_left_out = home not in homes_in(collection_path.read_text(encoding="utf-8"))
    return True if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the wanted home.

    Raises:
        pytest.UsageError: a test has two homes.
    """
    homes = {item: home_of([mark.name for mark in item.iter_markers()], _own_marks(item)) for item in items}
    wanted = config.getoption("--home")
    if wanted is not None:
        _keep(config, items, [item for item in items if homes[item] == wanted])
    elif not config.getoption("markexpr"):
        _keep(config, items, [item for item in items if homes[item] != "campaign"])


def has_all_quick_tests(config: pytest.Config) -> bool:
    """Returns whether a session has collected all quick tests, as `make test` does."""
    is_whole = config.args == config.getini("testpaths") and not config.getoption("keyword")
    return is_whole and config.getoption("--home") == "quick"


def _own_marks(item: pytest.Item) -> list[str]:
    return [mark.name for mark in item.own_markers]


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    is_kept = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in is_kept])
    items[:] = kept


def home_of(marks: Iterable[str], own_marks: Collection[str]) -> str:
    """Returns the home of a test.

    Args:
        marks: names of all its marks, its own before those of its class and file.
        own_marks: names of those that the test itself has.

    Raises:
        pytest.UsageError: the test itself has the marks of two homes.
    """
    if len(set(own_marks) & set(MARKED)) > 1:
        raise pytest.UsageError(f"a test has one home; this one has the marks {', '.join(own_marks)}")
    return next((name for name in marks if name in MARKED), "quick")


def homes_in(source: str) -> set[str]:
    """Returns the homes that tests of a file may have, from the marks that its text names."""
    tree = ast.parse(source)
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in MARKED}
    of_file = {
        node.attr
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute) and node.attr in MARKED
    }
    return named if of_file else named | {"quick"}


def without_a_test(guarantees: Mapping[str, str], nodes: Iterable[str]) -> list[str]:
    """Returns the guarantees whose test is not among these.

    Args:
        guarantees: the id of a test by what it guarantees, with "[case]" where one case is meant.
        nodes: ids such as "tests/data/test_order.py::test_name[case]".
    """
    present = set(nodes)
    tests = present | {node.partition("[")[0] for node in present}
    return [f"{guarantee} ({test})" for guarantee, test in guarantees.items() if test not in tests]
