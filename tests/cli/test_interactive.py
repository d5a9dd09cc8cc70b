from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli import interactive
from slurm_train.config.schema import RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.supervise.srun import share_of
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


def script(run: RunDirectory, *lines: str) -> list[str]:
    """Returns a command that opens attempt 1 as a supervisor would, and then does as the lines say."""
    begin = [f"mkdir -p {run.attempt_logs(1)}", f"touch {run.epochs / 'attempt_1'}", f"log={run.rank_log(1, 0)}"]
    return ["sh", "-c", "\n".join([*begin, *lines])]


def attend(run: RunDirectory, command: list[str]) -> int:
    return interactive.attend(run, command, env={"PATH": os.environ["PATH"]})


def test_what_rank_0_says_is_on_the_terminal(run: RunDirectory, capfdbinary: Any) -> None:
    assert attend(run, script(run, "echo step 1 > $log", "echo step 2 >> $log")) == 0
    assert capfdbinary.readouterr().out == b"step 1\nstep 2\n"


def test_without_a_rank_what_srun_said_is_shown(run: RunDirectory, capfdbinary: Any) -> None:
    batch_log = run.attempt_logs(1) / "batch.log"
    assert attend(run, script(run, f"echo srun: error > {batch_log}", "exit 1")) == 1
    captured = capfdbinary.readouterr()
    assert captured.out == b"srun: error\n" and b"the same command continues the run" in captured.err


def ctrl_c_when(is_time: Any) -> threading.Thread:
    """Presses Ctrl-C once something is so."""

    def press() -> None:
        wait_for(is_time, within_s=20, what="the moment for Ctrl-C")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_ctrl_c_asks_to_save_and_stop(run: RunDirectory, capfdbinary: Any) -> None:
    pressing = ctrl_c_when(run.rank_log(1, 0).exists)
    waits = f"while [ ! -e {run.stop_file} ]; do sleep 0.05; done"
    assert attend(run, script(run, "echo step 1 > $log", waits, "echo saved >> $log", "exit 75")) == 75
    pressing.join()
    captured = capfdbinary.readouterr()
    assert captured.out == b"step 1\nsaved\n" and b"saving and stopping" in captured.err


def test_the_second_ctrl_c_ends_the_ranks(run: RunDirectory, capfdbinary: Any) -> None:
    presses = [ctrl_c_when(run.rank_log(1, 0).exists), ctrl_c_when(run.stop_file.exists)]
    assert attend(run, script(run, "echo step 1 > $log", "exec sleep 60")) == 128 + signal.SIGTERM
    for press in presses:
        press.join()
    assert b"ending the ranks" in capfdbinary.readouterr().err


def test_ctrl_c_before_anything_has_begun_gives_the_request_back(run: RunDirectory, tmp_path: Path) -> None:
    pressing = ctrl_c_when((tmp_path / "waiting").exists)
    assert attend(run, ["sh", "-c", f"touch {tmp_path / 'waiting'}; exec sleep 60"]) == 128 + signal.SIGTERM
    pressing.join()
    assert not run.stop_file.exists()


def test_outside_an_allocation_one_is_made(shell: Any) -> None:
    done = shell.types("+cluster=2x4", "launch=interactive", "cluster.time_limit_min=30")
    assert done.code == 7
    words = shell.slurm.said("salloc_words").split()
    (run,) = [path.parent for path in (shell.folder / "runs").rglob("submit.sh")]
    assert words[-2:] == ["bash", str(run / "submit.sh")]
    assert {"--nodes=2", "--ntasks=8", "--gpus-per-node=4", "--time=30"} <= set(words)
    assert shell.slurm.said("submitted.sh") is None and (run / "config.yaml").is_file()


def test_an_allocation_that_slurm_would_not_give_writes_nothing(shell: Any) -> None:
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Invalid partition name specified")
    done = shell.types("+cluster=2x4", "launch=interactive")
    assert done.code == 2 and "Slurm would not take this job" in done.err and shell.left() == []


def test_inside_one_the_script_runs_here(shell: Any) -> None:
    shell.patch.setenv("SLURM_JOB_ID", "55")
    (shell.slurm.folder / "job.out").write_text(JOB)
    bash = shell.slurm.folder / "bash"
    bash.write_text(f'#!/bin/sh\necho "$@" > {shell.slurm.folder}/bash_words\nenv > {shell.slurm.folder}/bash_env\n')
    bash.chmod(0o755)
    done = shell.types("+cluster=1x2", "launch=interactive")
    assert done.code == 0, done.err
    assert shell.slurm.said("bash_words").strip().endswith("/submit.sh")
    assert "SLURM_JOB_ID=55" in shell.slurm.said("bash_env")
    assert shell.slurm.said("salloc_words") is None


def test_an_allocation_that_is_too_small_writes_nothing(shell: Any) -> None:
    shell.patch.setenv("SLURM_JOB_ID", "55")
    (shell.slurm.folder / "job.out").write_text(JOB)
    done = shell.types("+cluster=2x2", "launch=interactive")
    assert done.code == 2 and shell.left() == []
    assert "too small for this run: 1 nodes, 2 asked; 2 GPUs, 4 asked" in done.err and "salloc --job-name" in done.err


def allocation(nodes: tuple[str, ...], tasks: tuple[int, ...]) -> Allocation:
    return Allocation(
        requeue_id="1",
        restart_count=0,
        nodes=nodes,
        tasks_per_node=tasks,
    )


@pytest.mark.parametrize(
    ("ranks_per_node", "nodes", "tasks"),
    [
        ([1, 1], ("n1", "n2"), (1, 1)),
        ([4, 4], ("n1", "n2"), (4, 4)),
        ([2], ("n1",), (2,)),
        # More than there is: srun will say so.
        ([1, 1, 1], ("n1", "n2"), (1, 1)),
    ],
)
def test_a_run_takes_its_share_of_an_allocation(
    ranks_per_node: list[int], nodes: tuple[str, ...], tasks: tuple[int, ...], run: RunDirectory
) -> None:
    run.plan.write_text(f'{{"world": {{"ranks_per_node": {ranks_per_node}}}}}')
    found, num_ranks = share_of(allocation(("n1", "n2"), (1, 1)), run, RunConfig())
    assert (found.nodes, found.tasks_per_node, num_ranks) == (nodes, tasks, sum(tasks))
