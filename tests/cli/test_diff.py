"""`diff`: two runs, or a run and its folder as it is now; configuration, code and environment."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slurm_train.launch.environment import environment_from, write_provenance
from slurm_train.launch.snapshot import SourceState, read_source
from slurm_train.launch.write import write_run
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell
from tests.support.plans import make_plan

MODEL = {"_target_": "mine.Model", "width": 8}


def submitted(folder: Path, name: str, *, commit: str | None = None, **sections: Any) -> RunDirectory:
    """Writes a run of the files in a folder as a submission does, short of Slurm."""
    plan = make_plan(folder, **{"model": MODEL, **sections, "run": {"name": name}})
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_file()))
    source = read_source(plan.run, plan.config, folder, SourceState(names, commit, ""), env=os.environ)
    write_run(plan, source, script=None)
    write_provenance(plan.run.provenance, source, words=[], slurm=None)
    return plan.run


def took(run: RunDirectory, **facts: Any) -> None:
    """Gives a run's first attempt an environment."""
    run.epochs.mkdir()
    (run.epochs / "attempt_0").write_text("{}")
    run.attempt_logs(0).mkdir()
    run.environment(0).write_text(json.dumps(asdict(environment_from(facts))))


@pytest.fixture
def two(shell: Shell) -> tuple[RunDirectory, RunDirectory]:
    """Two runs that differ in everything."""
    (shell.folder / "train.py").write_text("a = 1\nb = 2\n")
    (shell.folder / "data.bin").write_bytes(b"\xff\x00")
    (shell.folder / "gone.py").write_text("x\n")
    one = submitted(shell.folder, "one", commit="1" * 40)
    took(one, python="3.11.2", torch="2.6.0", slurm="22.05.8", packages={"torch": "2.6.0", "numpy": "1.26.4"})
    (shell.folder / "train.py").write_text("a = 1\nb = 3\n")
    (shell.folder / "data.bin").write_bytes(b"\xff\x01")
    (shell.folder / "gone.py").unlink()
    sections = {"optim": {"lr": 0.5}, "checkpoint": {"keep": 7}, "model": {**MODEL, "depth": 3}}
    other = submitted(shell.folder, "two", commit="2" * 40, **sections)
    took(other, python="3.11.2", torch="2.7.0", slurm="22.05.8", packages={"torch": "2.7.0", "numpy": "2.0.0"})
    return one, other


def test_all_that_differs_is_shown(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    one, other = two
    done = shell.types("diff", "one", "two")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"--- one/{one.run_id}  {one.path}\n+++ two/{other.run_id}  {other.path}\n\nconfig\n")
    config, _, rest = done.out.partition("\n\nconfig\n")[2].partition("\n\n")
    assert config.splitlines() == [
        "  model.depth      null -> 3",
        "  optim.lr         0.001 -> 0.5",
        "  checkpoint.keep  2 -> 7  (does not change what is trained)",
        "  run.name         one -> two  (does not change what is trained)",
    ]
    assert (
        rest
        == """\
code: 111111111 -> 222222222
Files a/data.bin and b/data.bin differ
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
--- a/train.py
+++ b/train.py
@@ -1,2 +1,2 @@
 a = 1
-b = 2
+b = 3

environment
  torch: 2.6.0 -> 2.7.0
  numpy: 1.26.4 -> 2.0.0
"""
    )


def test_parts_can_be_chosen_and_files_counted(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    done = shell.types("diff", "one", "two", "--only", "code", "--stat")
    assert done.out.splitlines()[3:] == [
        "code: 111111111 -> 222222222",
        "  data.bin: changed",
        "  gone.py: gone, +0 -1",
        "  train.py: +1 -1",
    ]
    refused = shell.types("diff", "one", "two", "--only", "cod")
    assert refused.code == 2 and "--only cod: there is no such part" in refused.err


def test_json_has_it_all(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    found = json.loads(shell.types("diff", "one", "two", "--json").out)
    assert found["same"] is False and found["new"] == str(two[1].path)
    assert {"key": "optim.lr", "old": 0.001, "new": 0.5, "trains": True} in found["config"]
    assert [(file["name"], file["what"], file["added"]) for file in found["code"]["files"]] == [
        ("data.bin", "changed", None),
        ("gone.py", "gone", 0),
        ("train.py", "changed", 1),
    ]
    assert found["code"]["files"][2]["diff"].endswith("-b = 2\n+b = 3")
    assert {"name": "numpy", "old": "1.26.4", "new": "2.0.0", "is_package": True} in found["environment"]


def test_a_run_is_the_same_as_itself(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    done = shell.types("diff", "one", "one")
    assert done.out.splitlines()[3::2] == ["config: the same", "code: the same", "environment: the same"]
    assert json.loads(shell.types("diff", "one", "one", "--json").out)["same"] is True


def test_one_run_is_compared_with_the_folder_as_it_is_now(shell: Shell) -> None:
    (shell.folder / "train.py").write_text("a = 1\n")
    submitted(shell.folder, "one")
    assert "code: the same" in shell.types("diff", "one").out
    (shell.folder / "train.py").write_text("a = 2\n")
    (shell.folder / "new.py").write_text("x\n")
    done = shell.types("diff", "one", "--stat")
    assert done.out.splitlines()[1:] == [
        "+++ now",
        "",
        "code",
        "  new.py: new, +1 -0",
        "  train.py: +1 -1",
        "",
        "environment: the same",
    ]


def test_a_folder_that_is_gone_is_named(shell: Shell) -> None:
    (shell.folder / "inner").mkdir()
    (shell.folder / "inner" / "train.py").write_text("a = 1\n")
    run = submitted(shell.folder / "inner", "one")
    (shell.folder / "inner" / "train.py").unlink()
    run.path.parents[1].rename(shell.folder / "runs")
    (shell.folder / "inner").rmdir()
    done = shell.types("diff", "one")
    assert done.code == 2 and "came from is not there" in done.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours(
    no_color: str,
    coloured: bool,
    shell: Shell,
    two: tuple[RunDirectory, RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slurm_train.cli import diff

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert diff.main(["one", "two"]) == 0
    assert ("\x1b[32m+b = 3" in terminal.getvalue()) is coloured
