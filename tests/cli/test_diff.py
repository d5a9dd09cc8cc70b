"""`diff`: two runs, or a run and its folder as it is now; configuration, code and environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import diff
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.snapshot import SourceState, read_source
from slurm_train.launch.write import write_run
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell
from tests.support.plans import make_plan

MODEL = {"_target_": "mine.Model", "width": 8}


def submitted(folder: Path, name: str, *, commit: str | None = None, torch: str = "", **sections: Any) -> RunDirectory:
    """Writes a run of the files in a folder as a submission does, short of Slurm; its job had this torch."""
    plan = make_plan(folder, **{"model": MODEL, **sections, "run": {"name": name}})
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_file()))
    source = read_source(plan.run, plan.config, folder, SourceState(names, commit, ""), env=os.environ)
    write_run(plan, source, script=None)
    write_provenance(plan.run.provenance, source, words=[], slurm=None)
    if torch:
        plan.run.epochs.mkdir()
        (plan.run.epochs / "attempt_0").write_text("{}")
        plan.run.attempt_logs(0).mkdir()
        facts = {"python": "3.11.2", "torch": torch, "packages": {"torch": torch, "numpy": torch}}
        plan.run.environment(0).write_text(json.dumps(facts))
    return plan.run


@pytest.fixture
def two(shell: Shell) -> tuple[RunDirectory, RunDirectory]:
    """Two runs that differ in everything."""
    (shell.folder / "train.py").write_text("a = 1\nb = 2\n")
    (shell.folder / "data.bin").write_bytes(b"\xff\x00")
    (shell.folder / "gone.py").write_text("x\n")
    one = submitted(shell.folder, "one", commit="1" * 40, torch="2.6.0")
    (shell.folder / "train.py").write_text("a = 1\nb = 3\n")
    (shell.folder / "data.bin").write_bytes(b"\xff\x01")
    (shell.folder / "gone.py").unlink()
    sections = {"optim": {"lr": 0.5}, "checkpoint": {"keep": 7}, "model": {**MODEL, "depth": 3}}
    return one, submitted(shell.folder, "two", commit="2" * 40, torch="2.7.0", **sections)


ALL = """\
--- one/{one.run_id}  {one.path}
+++ two/{two.run_id}  {two.path}

config
  model.depth      null -> 3
  optim.lr         0.001 -> 0.5
  checkpoint.keep  2 -> 7  (does not change what is trained)
  run.name         one -> two  (does not change what is trained)

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
  numpy: 2.6.0 -> 2.7.0
"""
COUNTED = ["code: 111111111 -> 222222222", "  data.bin: changed", "  gone.py: gone, +0 -1", "  train.py: +1 -1"]


def test_all_that_differs_is_shown_or_parts_of_it(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    done = shell.types("diff one two")
    assert (done.code, done.err, done.out) == (0, "", ALL.format(one=two[0], two=two[1]))
    assert shell.types("diff one two --only code --stat").out.splitlines()[3:] == COUNTED
    shell.refuses("--only cod: there is no such part", "diff one two --only cod")
    done = shell.types("diff one one")
    assert done.out.splitlines()[3::2] == ["config: the same", "code: the same", "environment: the same"]
    for no_color, is_coloured in (("", True), ("1", False)):
        shell.patch.setattr(diff, "takes_escapes", lambda _stream, env: not env["NO_COLOR"])
        shell.patch.setenv("NO_COLOR", no_color)
        assert ("\x1b[32m+b = 3\x1b[0m" in shell.types("diff one two").out) is is_coloured


def test_json_has_it_all(shell: Shell, two: tuple[RunDirectory, RunDirectory]) -> None:
    found = json.loads(shell.types("diff one two --json").out)
    assert found["same"] is False and found["new"] == str(two[1].path)
    assert {"key": "optim.lr", "old": 0.001, "new": 0.5, "trains": True} in found["config"]
    files = found["code"]["files"]
    assert [(file["what"], file["added"]) for file in files] == [("changed", None), ("gone", 0), ("changed", 1)]
    assert files[2]["diff"].endswith("-b = 2\n+b = 3")
    assert {"name": "numpy", "old": "2.6.0", "new": "2.7.0", "is_package": True} in found["environment"]
    assert json.loads(shell.types("diff one one --json").out)["same"] is True


def test_one_run_is_compared_with_the_folder_as_it_is_now(shell: Shell) -> None:
    inner = shell.folder / "inner"
    inner.mkdir()
    (inner / "train.py").write_text("a = 1\n")
    run = submitted(inner, "one")
    root = f"--root {run.path.parents[1]}"
    assert "code: the same" in shell.types(f"diff one {root}").out
    (inner / "train.py").write_text("a = 2\n")
    (inner / "new.py").write_text("x\n")
    shown = shell.types(f"diff one --stat {root}").out.partition("+++ now\n")[2]
    assert shown == "\ncode\n  new.py: new, +1 -0\n  train.py: +1 -1\n\nenvironment: the same\n"
    run.path.parents[1].rename(shell.folder / "runs")
    for name in ("train.py", "new.py"):
        (inner / name).unlink()
    inner.rmdir()
    shell.refuses("came from is not there", "diff one")
