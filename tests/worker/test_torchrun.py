"""The launcher of one node: how many ranks it starts, and what becomes of a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.master import probe_port
from slurm_train.distributed.rendezvous import NodeRanks, run_ranks
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import read_marks
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlannedWorld
from slurm_train.worker.rank import _leave_restart
from slurm_train.worker.torchrun import children_of, granted_ranks, leave_mark_for, outcome
from tests.support.command_line import TINY, Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.ports import free_port
from tests.support.waiting import wait_for

WORLD = PlannedWorld(size=6, ranks_per_node=(4, 2))
GRANTED = [
    ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 0, 8),
    ({"CUDA_VISIBLE_DEVICES": "3,5,7"}, 0, 3),
    ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": ""}, 0, 4),
    ({}, 1, 2),
]


def test_a_node_starts_what_slurm_has_granted_it() -> None:
    assert [granted_ranks(env, WORLD, node=node) for env, node, _ in GRANTED] == [ranks for _, _, ranks in GRANTED]


def test_a_script_that_the_warning_has_ended_has_not_failed(tmp_path: Path) -> None:
    run, script = RunDirectory(tmp_path), RunConfig(script=["train.py"])
    open_attempt(run, Start(job_id="1", restart_count=0, nodes=("node1",), world_size=1))
    assert outcome(run, script, 0, 1, sent_signals={signal.SIGUSR2}) == 128 + signal.SIGUSR2
    assert outcome(run, script, 0, 1, sent_signals={signal.SIGTERM}) == 1
    assert outcome(run, script, 0, 0, sent_signals={signal.SIGUSR2}) == 0


def test_ranks_that_have_saved_want_to_be_run_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, Start(job_id="1", restart_count=0, nodes=("node1",), world_size=1))
    for code in (0, 75):
        assert _leave_restart(run, 0, code, closes=False) == 0
        assert outcome(run, RunConfig(), 0, 0, sent_signals=()) == code


@pytest.mark.parametrize(
    ("act", "words", "code"),
    [
        ("ctypes.string_at(8)", "Segmentation fault", 128 + signal.SIGSEGV),
        ("os._exit(3)", "ended with exit code 3", 3),
    ],
)
def test_a_rank_that_cannot_leave_a_mark_gets_one(tmp_path: Path, act: str, words: str, code: int) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, Start(job_id="1", restart_count=0, nodes=("node1",), world_size=2))
    node = NodeRanks(
        address="127.0.0.1",
        run_id="crash",
        num_nodes=1,
        node_rank=0,
        host="localhost",
        num_ranks=2,
        endpoint=f"localhost:{free_port()}",
        max_restarts=0,
        timeout_s=60.0,
    )
    program = tmp_path / "crash.py"
    program.write_text(f"import ctypes, os, time\nif os.environ['RANK'] == '1':\n    {act}\ntime.sleep(60)\n")
    on_failed = partial(leave_mark_for, run, 0, host="node1")
    assert run_ranks(node, [sys.executable, str(program)], on_failed=on_failed) == 1
    (mark,) = read_marks(run, 0)
    assert (str(mark.cause), mark.exit_code) == (f"rank 1 on node1: {words}", code)


def test_a_rank_that_ended_without_a_word_is_named_unless_it_has_a_mark(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, Start(job_id="1", restart_count=0, nodes=("node1",), world_size=2))
    run.rank_log(0, 1).write_text("step 3\nno licence\n")
    for code in (143, 3, 3):
        leave_mark_for(run, 0, 1, code, host="node1")
    (mark,) = read_marks(run, 0)
    assert (str(mark.cause), mark.exit_code) == (
        "rank 1 on node1: ended with exit code 3; its last words: no licence",
        3,
    )


def test_a_rank_that_was_asked_to_stop_leaves_no_mark(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    open_attempt(run, Start(job_id="1", restart_count=0, nodes=("node1",), world_size=1))
    leave_mark_for(run, 0, 0, -signal.SIGTERM, host="node1")
    assert read_marks(run, 0) == []


def test_children_are_found_by_their_parent() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in children_of(os.getpid()) and children_of(child.pid) == []
        finally:
            child.kill()


def starts_launcher(person: Person, run: RunDirectory) -> subprocess.Popen[bytes]:
    """Starts one node's launcher as the supervisor and srun would, on two GPUs of this node."""
    start = Start(job_id="1", restart_count=0, nodes=("localhost",), world_size=2)
    attempt, host = open_attempt(run, start), "localhost"
    env = person.environment() | {"SLURM_TRAIN_ATTEMPT": str(attempt), "SLURM_GPUS_ON_NODE": "2"}
    env |= dict.fromkeys(("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    env |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"), "1")
    env |= dict.fromkeys(("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"), host)
    env["MASTER_PORT"] = str(probe_port(str(run.path), attempt=attempt, env=env))
    return subprocess.Popen([sys.executable, "-m", "slurm_train", "torchrun", str(run.path)], cwd=run.code, env=env)


def settled_pid(run: RunDirectory, attempt: int, rank: int) -> int:
    beat = read_beats(run, attempt).get(rank)
    return beat.pid if beat is not None and beat.settled and beat.step >= 5 else 0


@pytest.mark.full
@pytest.mark.slow
def test_a_killed_rank_is_started_again_in_the_step_and_a_warning_saves(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    words = (*TINY, "train.max_steps=1000", "checkpoint.every_steps=2", "run.processes=2", "model.step_s=0.1")
    run = RunDirectory(Path(person.types("write", *words).out.strip()))
    with starts_launcher(person, run) as launcher:
        try:
            os.kill(wait_for(lambda: settled_pid(run, 0, 1), within_s=90, what="five steps"), signal.SIGKILL)
            wait_for(lambda: settled_pid(run, 1, 1), within_s=90, what="the next round")
            # Under proctrack/cgroup the launcher alone hears the warning before the time limit.
            launcher.send_signal(signal.SIGUSR2)
            assert launcher.wait(timeout=60) == 75
        finally:
            launcher.kill()
    killed, stopped = ledger_lines(run)
    assert (killed["reason"], killed["action"], stopped["job_id"]) == ("failed", "relaunch", "1")
    assert not run.result.exists()
    assert (run.attempt_logs(1) / "rank_1.log").is_file()
