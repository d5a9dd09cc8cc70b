"""What to run after an edit: lint, and the quick tests that the changed modules can reach, nearest first.

    python .ci/check.py             # what differs from HEAD; in a clean tree, what the last commit changed
    python .ci/check.py --base main

A test file can reach a module if it imports it, directly or through other modules; a module that is named in a string
("slurm_train.cli.plan") counts as imported. Tests that have not begun within the budget are left out.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("slurm_train", "tests")
# Files that are no modules: whoever reads them is asked instead.
READERS = {
    "conf": "slurm_train/assets.py",
    "sbatch_templates": "slurm_train/assets.py",
    "docs": "tests/test_docs.py",
    "README.md": "tests/test_docs.py",
    "CHANGELOG.md": "tests/test_docs.py",
    "CONTRIBUTING.md": "tests/test_docs.py",
    "Makefile": "tests/test_homes.py",
}
ALWAYS = ("tests/test_architecture.py", "tests/test_homes.py")


def main() -> int:
    """Lints, tests, and returns an exit code: 0 where all of it passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="revision to compare with")
    parser.add_argument("--budget-s", type=float, default=90.0, help="seconds after which no further test begins")
    parser.add_argument("--list", action="store_true", help="print the test files and run nothing")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.budget_s
    changed = sorted(changed_files(arguments.base))
    graph = read_graph(REPOSITORY)
    distances = distances_to_tests(graph, [reader_of(path) for path in changed])
    files = sorted(distances, key=lambda path: (distances[path], path))
    print(f"== {len(changed)} changed files; {len(files)} test files can reach them")
    if arguments.list:
        print("\n".join(f"{distances[path]} {path}" for path in files))
        return 0
    lints = [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]]
    failed = [" ".join(words) for words in lints if run(words)]
    files += [path for path in ALWAYS if path not in files]
    outcome = Outcome()
    words = ["--quiet", "--home=quick", "-m", "not slurm", "--numprocesses=2", f"--until={until_s}", *files]
    code = pytest.main(words, plugins=[outcome])
    # pytest counts the end of its time as an interruption.
    is_over = code == pytest.ExitCode.INTERRUPTED and not outcome.is_failed
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not is_over:
        failed.append("pytest")
    if is_over:
        print(f"== {arguments.budget_s:.0f} s are over: the tests that are farthest away were left out (make test)")
    print(f"== {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


class Outcome:
    """Whether a test has failed, also where pytest ends as interrupted."""

    def __init__(self) -> None:
        self.is_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts failures."""
        self.is_failed = self.is_failed or report.failed

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tells a person's Ctrl-C from the end of the time."""
        self.is_failed = self.is_failed or excinfo.type is KeyboardInterrupt


def run(words: list[str]) -> int:
    """Runs a tool of the environment and returns its exit code."""
    print(f"== {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, check=False).returncode


def changed_files(base: str) -> set[str]:
    """Returns the paths that differ from a revision, with those that git does not know yet.

    Args:
        base: the revision; "": HEAD, and where nothing differs from it, the commit before.
    """
    named = set(git("diff", "--name-only", base or "HEAD"))
    named |= set(git("ls-files", "--others", "--exclude-standard"))
    if not named and not base:
        named = set(git("diff", "--name-only", "HEAD~1"))
    return named


def git(*words: str) -> list[str]:
    """Returns the lines that git prints."""
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def reader_of(path: str) -> str:
    """Returns the file that stands for a changed one: itself, or whoever reads it."""
    return READERS.get(path.partition("/")[0], path)


def read_graph(root: Path) -> Mapping[str, set[str]]:
    """Returns which files import each file of the package and of the tests, by path."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = {module_name(path.relative_to(root)): str(path.relative_to(root)) for path in paths}
    importers: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        user = str(path.relative_to(root))
        for name in named_modules(ast.parse(path.read_text(encoding="utf-8"))):
            module = known_module(name, names)
            if module is not None and names[module] != user:
                importers[names[module]].add(user)
    for user in map(str, (path.relative_to(root) for path in paths if path.name == "conftest.py")):
        folder = user.removesuffix("conftest.py")
        importers[user] |= {path for path in names.values() if path.startswith(folder) and path != user}
    return importers


def module_name(path: Path) -> str:
    """Returns the dotted name of a file, e.g. "slurm_train.rundir" for slurm_train/rundir/__init__.py."""
    words = path.with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def named_modules(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a file imports, anywhere in it, or has in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(PACKAGES):
            yield node.value


def known_module(name: str, names: Mapping[str, str]) -> str | None:
    """Returns the module that a dotted name is, or is of: "slurm_train.errors" for "slurm_train.errors.ConfigError"."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    # The package itself is imported with each of its modules, and has next to nothing in it.
    return name if "." in name else None


def distances_to_tests(importers: Mapping[str, Iterable[str]], changed: Iterable[str]) -> dict[str, int]:
    """Returns the test files that can reach a changed file, with the least number of imports on the way."""
    distances = dict.fromkeys(changed, 0)
    pending = deque(distances)
    while pending:
        path = pending.popleft()
        for user in importers.get(path, ()):
            if user not in distances:
                distances[user] = distances[path] + 1
                pending.append(user)
    return {path: distance for path, distance in distances.items() if fnmatch.fnmatch(path, "*/test_*.py")}


if __name__ == "__main__":
    sys.exit(main())
