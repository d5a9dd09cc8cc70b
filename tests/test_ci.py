"""The commands of `.ci`: what an edit can reach is found, and a part that fails keeps no other from running."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.command_line import REPOSITORY, write

CI = Path(__file__).resolve().parents[1] / ".ci"

_TREE = {
    "slurm_train/errors.py": "",
    "slurm_train/rundir/files.py": "from slurm_train.errors import E",
    "slurm_train/rundir/paths.py": "",
    "slurm_train/cli/plan.py": "def f():\n    from slurm_train.rundir import files",
    "slurm_train/verbs.py": "VERBS = {'plan': 'slurm_train.cli.plan'}",
    "tests/support/shell.py": "import slurm_train.verbs",
    "tests/cli/conftest.py": "from tests.support.shell import Shell",
    "tests/cli/test_plan.py": "",
    "tests/rundir/test_files.py": "from slurm_train.rundir.files import write",
    "tests/rundir/test_paths.py": "from slurm_train.rundir import paths",
}


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", CI / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("slurm_train/rundir/paths.py", {"tests/rundir/test_paths.py": 1}),
        # Through a function's import, a name in a string, and a conftest.
        ("slurm_train/rundir/files.py", {"tests/rundir/test_files.py": 1, "tests/cli/test_plan.py": 5}),
        ("slurm_train/errors.py", {"tests/rundir/test_files.py": 2, "tests/cli/test_plan.py": 6}),
        ("tests/cli/test_plan.py", {"tests/cli/test_plan.py": 0}),
    ],
)
def test_an_edit_reaches_the_tests_that_import_it_on_any_way(
    changed: str, tests: dict[str, int], check: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, _TREE)
    assert check.distances_to_tests(check.read_graph(tmp_path), [changed]) == tests


def test_no_further_test_begins_where_the_time_is_over(tmp_path: Path) -> None:
    tests = "import pytest\n\n@pytest.mark.parametrize('number', range(9))\ndef test_it(number):\n    pass\n"
    write(tmp_path, {"test_one.py": tests, "test_two.py": tests})
    words = ["-p", "tests.deadline", f"--until={time.monotonic()}", "--numprocesses=2", "--dist=loadfile"]
    command = [sys.executable, "-m", "pytest", *words, f"--rootdir={tmp_path}", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    # Each process has ended its first.
    assert re.search(r"\b[12] passed", done.stdout), done.stdout


def test_every_part_runs_and_the_last_lines_have_the_verdict_of_each(tmp_path: Path) -> None:
    rules = "one:\n\t@echo '== 3 passed =='\ntwo:\n\t@echo broken; exit 3\nthree:\n\t@touch made\n"
    write(tmp_path, {"Makefile": rules})
    command = [str(CI / "parts.sh"), "all", "one", "two", "three"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (tmp_path / "made").exists()
    head, *verdicts = done.stdout.splitlines()[-4:]
    assert head.startswith("== make all: FAILED")
    assert [line.split()[:2] for line in verdicts] == [["passed", "one"], ["FAILED", "two"], ["passed", "three"]]
    assert verdicts[0].endswith("3 passed")


@pytest.mark.parametrize("page", ["configuration_page", "module_list", "loop"])
def test_what_is_made_from_the_code_is_as_it_is(page: str) -> None:
    words = [sys.executable, CI / f"write_{page}.py", "--check"]
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CI / f"write_{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_hook_that_the_loop_does_not_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("loop")
    lines = module.loop()
    assert {"callback.on_step_end(trainer)", "result = stepper.step(facts, samples)"} <= {
        line.strip() for line in lines
    }
    monkeypatch.setattr(module, "loop", lambda: [line for line in lines if "on_save" not in line])
    with pytest.raises(AssertionError, match="no call of on_save"):
        module.main()


def test_a_module_that_is_not_listed_is_noticed(tmp_path: Path) -> None:
    """The list of a package of three files, of which one is added."""
    module = script("module_list")
    module.PACKAGE = tmp_path
    write(tmp_path, {"__init__.py": '"""All."""', "room/__init__.py": '"""A room."""', "room/a.py": '"""One | two."""'})
    page = module.render()
    assert "| `room/` | A room. |\n| `room/a` | One \\| two. |" in page
    write(tmp_path, {"room/b.py": '"""What it does,\nand more. And more."""'})
    assert module.render() != page
