from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from tests.support.command_line import TINY, Person, new_project
from tests.support.slurm_runs import losses, wait_until_step
from tests.support.waiting import wait_for


def test_what_is_printed_to_a_pipe_that_nobody_reads_goes_on_in_a_file(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from slurm_train.cli.lost_terminal import outlive_terminal\n"
        "outlive_terminal(pathlib.Path(sys.argv[1])); sys.stdin.read()\n"
        "print('one'); print('two', file=sys.stderr); print('three', flush=True); sys.exit(7)"
    )
    log = tmp_path / "out.log"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 7
    assert sorted(log.read_text().split()) == ["one", "three", "two"]


def test_a_run_whose_terminal_is_closed_saves_before_it_ends(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    words = [*TINY[:2], *TINY[3:], "train.max_steps=4000", "checkpoint.every_steps=null", "model.step_s=0.02"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(person.folder)
        os.execve(
            sys.executable,
            [sys.executable, "-m", "slurm_train", *words, "run.processes=2", "train.threads=1"],
            {**person.environment(), "TERM": "xterm"},
        )
    wait_for(lambda: list(person.folder.glob("runs/*/*/config.yaml")), within_s=60, what="the run directory")
    run = RunDirectory(next(person.folder.glob("runs/*/*/config.yaml")).parent)
    wait_until_step(run, 5, within_s=90)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert read_ledger(run)[-1]["reason"] == "stopped"
    saved = [name_of(path).step for path in list_checkpoints(run.checkpoints)]
    assert saved == [max(losses(run))]
