"""`diff`: two runs, or a run and its folder as it is now; configuration, code and environment."""

from __future__ import annotations

import json

import pytest

from slurm_train.cli import diff
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell

WORDS = "+cluster=1x1 model._target_=mine.Model data._target_=mine.Data batch.global_size=8"


def submitted(shell: Shell, words: str, *, torch: str) -> RunDirectory:
    """Submits a run of the files in the folder; its job had this torch."""
    run = shell.submits(f"{WORDS} {words}")
    run.epochs.mkdir()
    (run.epochs / "attempt_0").write_text("{}")
    run.attempt_logs(0).mkdir()
    run.environment(0).write_text(json.dumps({"python": "3.11.2", "torch": torch, "packages": {"torch": torch}}))
    return run


@pytest.fixture
def one(shell: Shell) -> RunDirectory:
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data: ...\nb = 2\n")
    (shell.folder / "gone.py").write_text("x\n")
    (shell.folder / "odd.py").write_bytes(b"\xff\x00")
    return submitted(shell, "run.name=one", torch="2.6.0")


ALL = """\
--- one/{one.run_id}  {one.path}
+++ two/{two.run_id}  {two.path}

config
  optim.lr         0.003 -> 0.5
  checkpoint.keep  2 -> 7  (does not change what is trained)
  run.name         one -> two  (does not change what is trained)

code
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
--- a/mine.py
+++ b/mine.py
@@ -1,3 +1,3 @@
 class Model: ...
 class Data: ...
-b = 2
+b = 3
Files a/odd.py and b/odd.py differ

environment
  torch: 2.6.0 -> 2.7.0
"""


def test_all_that_differs_of_two_runs_is_shown_or_parts_of_it(shell: Shell, one: RunDirectory) -> None:
    (shell.folder / "mine.py").write_text("class Model: ...\nclass Data: ...\nb = 3\n")
    (shell.folder / "gone.py").unlink()
    (shell.folder / "odd.py").write_bytes(b"\xff\x01")
    shell.slurm.next_job(4712)
    two = submitted(shell, "run.name=two optim.lr=0.5 checkpoint.keep=7", torch="2.7.0")
    done = shell.types("diff one two")
    assert (done.code, done.err, done.out) == (0, "", ALL.format(one=one, two=two))
    counted = ["code", "  gone.py: gone, +0 -1", "  mine.py: +1 -1", "  odd.py: changed"]
    assert shell.types("diff one two --only code --stat").out.splitlines()[3:] == counted
    found = json.loads(shell.types("diff one two --json").out)
    assert {"key": "optim.lr", "old": 0.003, "new": 0.5, "trains": True} in found["config"]
    assert [(file["what"], file["added"]) for file in found["code"]["files"]] == [
        ("gone", 0),
        ("changed", 1),
        ("changed", None),
    ]
    shell.patch.setattr(diff, "takes_escapes", lambda *_: True)
    assert "\x1b[32m+b = 3\x1b[0m" in shell.types("diff one two").out
    shell.refuses("--only cod: there is no such part", "diff one two --only cod")
    shell.refuses("--only config needs two runs", "diff one --only config")


def test_one_run_is_compared_with_the_folder_as_it_is_now(shell: Shell, one: RunDirectory) -> None:
    assert "code: the same" in shell.types("diff one").out
    (shell.folder / "new.py").write_text("x\n")
    shown = shell.types("diff one --stat").out.partition("+++ now\n")[2]
    assert "\ncode\n  new.py: new, +1 -0\n\nenvironment" in shown
