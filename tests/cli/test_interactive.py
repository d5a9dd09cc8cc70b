from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import here
from slurm_train.config.schema import RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.supervise.srun import pool_of
from tests.cli.conftest import Shell
from tests.support.waiting import wait_for

JOB = (
    "JobId=55 JobName=bash\n   JobState=RUNNING Restarts=0\n   NumNodes=1 NumCPUs=8\n   TRES=cpu=8,node=1,gres/gpu=2\n"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with an attempt behind it."""
    run = RunDirectory(tmp_path / "runs" / "gpt" / "3f9a1c07")
    run.attempt_logs(0).mkdir(parents=True)
    run.rank_log(0, 0).write_text("of old\n")
    run.epochs.mkdir()
    (run.epochs / "attempt_0").touch()
    return run


def attend(run: RunDirectory, *lines: str, begins: bool = True) -> int:
    """Attends a command that opens attempt 1 as a supervisor would, and then does as the lines say."""
    begin = [f"mkdir -p {run.attempt_logs(1)}", f"touch {run.epochs / 'attempt_1'}", f"log={run.rank_log(1, 0)}"]
    command = ["sh", "-c", "\n".join([*(begin if begins else []), *lines])]
    return here.attend(run, command, env={"PATH": os.environ["PATH"]})


@pytest.mark.parametrize(("log", "code"), [("rank_0.log", 0), ("batch.log", 1)])
def test_what_rank_0_says_or_else_srun_is_on_the_terminal(
    log: str, code: int, run: RunDirectory, capfdbinary: Any
) -> None:
    path = run.attempt_logs(1) / log
    assert attend(run, f"echo step 1 > {path}", f"echo step 2 >> {path}", f"exit {code}") == code
    captured = capfdbinary.readouterr()
    assert captured.out == b"step 1\nstep 2\n"
    assert (b"the same command continues the run" in captured.err) is bool(code)


def test_an_attempt_that_begins_at_once_is_shown(
    run: RunDirectory, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def start_and_wait(*words: Any, **options: Any) -> Any:
        process = start(*words, **options)
        wait_for((run.epochs / "attempt_1").exists, within_s=60, what="the attempt")
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_wait)
    assert attend(run, "echo step 1 > $log") == 0
    assert capfdbinary.readouterr().out == b"step 1\n"


def ctrl_c_when(*moments: Callable[[], bool]) -> threading.Thread:
    """Presses Ctrl-C once something is so, and again once something else is."""

    def press() -> None:
        for is_time in moments:
            wait_for(is_time, within_s=60, what="the moment for Ctrl-C", poll_s=0.05)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_ctrl_c_asks_to_save_and_stop(run: RunDirectory, capfdbinary: Any) -> None:
    pressing = ctrl_c_when(run.rank_log(1, 0).exists)
    waits = f"while [ ! -e {run.stop_file} ]; do sleep 0.05; done"
    assert attend(run, "echo step 1 > $log", waits, "echo saved >> $log", "exit 75") == 75
    pressing.join()
    captured = capfdbinary.readouterr()
    assert captured.out == b"step 1\nsaved\n" and b"saving and stopping" in captured.err


def test_the_second_ctrl_c_ends_the_ranks(run: RunDirectory, capfdbinary: Any) -> None:
    pressing = ctrl_c_when(run.rank_log(1, 0).exists, run.stop_file.exists)
    assert attend(run, "echo step 1 > $log", "exec sleep 60") == 128 + signal.SIGTERM
    pressing.join()
    assert b"ending the ranks" in capfdbinary.readouterr().err


def test_ctrl_c_before_anything_has_begun_gives_the_request_back(run: RunDirectory, tmp_path: Path) -> None:
    pressing = ctrl_c_when((tmp_path / "waiting").exists)
    assert attend(run, f"touch {tmp_path / 'waiting'}; exec sleep 60", begins=False) == 128 + signal.SIGTERM
    pressing.join()
    assert not run.stop_file.exists()


def test_outside_an_allocation_one_is_made(shell: Shell) -> None:
    assert shell.types("+cluster=2x4 launch=interactive cluster.time_limit_min=30").code == 7
    words = shell.slurm.said("salloc_words").split()
    (run,) = [path.parent for path in (shell.folder / "runs").rglob("submit.sh")]
    assert words[-2:] == ["bash", str(run / "submit.sh")]
    assert {"--nodes=2", "--ntasks=8", "--gpus-per-node=4", "--time=30"} <= set(words)
    assert shell.slurm.said("submitted.sh") is None and (run / "config.yaml").is_file()


def test_inside_one_the_script_runs_here_if_there_is_room(shell: Shell) -> None:
    shell.patch.setenv("SLURM_JOB_ID", "55")
    (shell.slurm.folder / "job.out").write_text(JOB)
    bash = shell.slurm.folder / "bash"
    bash.write_text(f'#!/bin/sh\necho "$@" > {shell.slurm.folder}/bash_words\nenv > {shell.slurm.folder}/bash_env\n')
    bash.chmod(0o755)
    lacks = "too small for this run: 1 nodes, 2 asked; 2 GPUs, 4 asked"
    assert "salloc --job-name" in shell.refuses(lacks, "+cluster=2x2 launch=interactive") and shell.left() == []
    assert shell.types("+cluster=1x2 launch=interactive").code == 0
    assert shell.slurm.said("bash_words").strip().endswith("/submit.sh")
    assert "SLURM_JOB_ID=55" in shell.slurm.said("bash_env")
    assert shell.slurm.said("salloc_words") is None


def test_a_run_takes_its_share_of_an_allocation(run: RunDirectory) -> None:
    allocation = Allocation(requeue_id="1", restart_count=0, nodes=("n1", "n2"), tasks_per_node=(1, 1))
    # More than there is: srun will say so.
    for asked, tasks in (([4, 4], (4, 4)), ([2], (2,)), ([1, 1, 1], (1, 1))):
        run.plan.write_text(json.dumps({"world": {"ranks_per_node": asked}}))
        pool = pool_of(allocation, run, RunConfig())
        nodes = pool.choose()
        assert nodes == ("n1", "n2")[: len(tasks)] and pool.tasks_per_node == tasks
        assert pool.num_ranks(len(nodes)) == sum(tasks)
