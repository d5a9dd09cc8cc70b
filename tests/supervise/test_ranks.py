"""The ranks of an attempt: the step of srun, the processes of this machine."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ClusterError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.records import TaskEnd, violent_end
from slurm_train.supervise import ranks
from slurm_train.supervise.ranks import (
    LocalRanks,
    RanksInWaiting,
    end_step,
    run_step,
    start_local,
    start_step,
)
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.support.process_faults import wait_until_gone
from tests.support.waiting import wait_for

# --- the step of srun ---


def ran(tmp_path: Path, program: str, *, is_overdue: bool = False) -> tuple[int, str]:
    log = tmp_path / "batch.log"
    with log.open("ab") as file:
        process = start_step([sys.executable, "-S", "-c", program], env=os.environ, log=file)
        code = run_step(process, log=file, is_overdue=lambda: is_overdue)
    return code, log.read_text()


def test_only_the_own_step_is_ended() -> None:
    commands = FakeSlurmCommands()
    commands.running_steps = {"7.0": "attempt_0", "7.1": "bash", "7.batch": "batch"}
    assert end_step("7", "attempt_0", commands, sleep=lambda _s: None)
    assert commands.cancelled == ["7.0"]


@pytest.mark.parametrize("error", [None, ClusterError("away")])
def test_a_step_that_stays_is_told(error: ClusterError | None) -> None:
    commands = FakeSlurmCommands()
    commands.running_steps, commands.stuck_steps = {"7.0": "attempt_0"}, {"7.0"}
    commands.error = error
    assert not end_step("7", "attempt_0", commands, within_s=0.01, sleep=lambda _s: None)


KILLED_SRUN = TaskEnd((), "", "srun itself was killed by signal 9")


@pytest.mark.parametrize(
    ("program", "is_overdue", "code", "said"),
    [
        ("import sys; sys.exit(3)", False, 3, None),
        # Ended here, since it has missed the end of its ranks.
        ("import signal; signal.pause()", True, 137, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False, 137, KILLED_SRUN),
    ],
)
def test_how_srun_ends_is_its_code_and_said_for_the_ledger(
    program: str, is_overdue: bool, code: int, said: TaskEnd | None, tmp_path: Path
) -> None:
    found, log = ran(tmp_path, program, is_overdue=is_overdue)
    assert (found, violent_end(log)) == (code, said)


# --- ranks in waiting ---

WAITS_FOR_A_LINE = "import sys; print('ready', flush=True); line = sys.stdin.readline(); print('got', line.strip())"


@pytest.fixture
def waiting(tmp_path: Path) -> RanksInWaiting:
    log = tmp_path / "waiting.log"
    with log.open("ab") as file:
        process = start_step([sys.executable, "-c", WAITS_FOR_A_LINE], env=os.environ, log=file, waits=True)
    wait_for(lambda: "ready" in log.read_text(), within_s=60, what="a process that waits")
    return RanksInWaiting(process=process, attempt=3, nodes=("node1",), log=log)


def test_ranks_in_waiting_begin_as_their_attempt_and_write_into_its_log(
    waiting: RanksInWaiting, tmp_path: Path
) -> None:
    process = waiting.start_attempt(3, ("node1",), tmp_path / "batch.log")
    assert process is not None and process.wait(20) == 0
    assert (tmp_path / "batch.log").read_text() == "ready\ngot begin\n" and not (tmp_path / "waiting.log").exists()
    assert waiting.start_attempt(4, ("node1",), tmp_path / "batch.log") is None
    waiting.dismiss()


@pytest.mark.parametrize(("attempt", "nodes"), [(4, ("node1",)), (3, ("node2",))])
def test_ranks_in_waiting_of_another_attempt_or_place_end(
    attempt: int, nodes: tuple[str, ...], waiting: RanksInWaiting, tmp_path: Path
) -> None:
    process = waiting.process
    assert waiting.start_attempt(attempt, nodes, tmp_path / "batch.log") is None
    assert process is not None and process.poll() == 0
    assert list(tmp_path.iterdir()) == []


def test_ranks_in_waiting_that_have_died_are_not_used(waiting: RanksInWaiting, tmp_path: Path) -> None:
    assert waiting.process is not None
    waiting.process.kill()
    waiting.process.wait()
    assert waiting.start_attempt(3, ("node1",), tmp_path / "batch.log") is None


def test_ranks_in_waiting_that_do_not_go_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_WAITING_GONE_S", 0.1)
    log = tmp_path / "waiting.log"
    with log.open("ab") as file:
        process = start_step(["sleep", "60"], env=os.environ, log=file, waits=True)
    RanksInWaiting(process=process, attempt=1, nodes=(), log=log).dismiss()
    assert process.poll() == -signal.SIGKILL and not log.exists()


# --- processes of this machine ---


@pytest.fixture
def local(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    return run


def start(local: RunDirectory, code: str, *, num_ranks: int = 2) -> LocalRanks:
    env = {**os.environ, "RUN": str(local.path), "MASTER_PORT": "1"}
    return start_local([sys.executable, "-c", code], run=local, attempt=0, num_ranks=num_ranks, env=env)


def test_each_rank_knows_its_place_and_writes_to_its_log(
    local: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    code = f"import os, sys; print(*(os.environ[name] for name in {names})); print('err', file=sys.stderr)"
    assert start(local, code, num_ranks=3).wait() == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("0 0 0 3 3 1\n", "err\n"), "rank 0 has the terminal"
    assert [local.rank_log(0, rank).stat().st_size > 0 for rank in range(3)] == [False, True, True]
    assert sorted(local.rank_log(0, 2).read_text().splitlines()) == ["2 2 0 3 3 1", "err"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("0 0", 0), ("75 0", 75), ("75 1", 1), ("-9 0", 137)],
)
def test_the_exit_code_of_the_whole(codes: str, expected: int, local: RunDirectory) -> None:
    code = (
        f"import os; code = int('{codes}'.split()[int(os.environ['RANK'])]);"
        "os.kill(os.getpid(), -code) if code < 0 else os._exit(code)"
    )
    assert start(local, code).wait() == expected


def test_a_rank_that_was_killed_is_named_before_those_that_fail_by_its_loss(local: RunDirectory) -> None:
    code = (
        "import os, time; rank = int(os.environ['RANK'])\n"
        "if rank == 1: os.kill(os.getpid(), 9)\n"
        "while os.path.exists(os.environ['RUN'] + '/wait'): time.sleep(0.01)\n"
        "os._exit(1)"
    )
    # Rank 0 fails in the same look, or later.
    for name in ("none", "wait"):
        (local.path / name).touch()
        started = start(local, code)
        started.kill_after_s = 0.2
        if name == "none":
            for process in started.processes:
                process.wait()
        assert started.wait() == 137
        assert started.ended.violent == TaskEnd((1,), socket.gethostname(), "Killed")
    started = start(local, "import os; os._exit(3)")
    assert (started.wait(), started.ended.violent) == (3, None)


def test_a_rank_that_ends_well_after_one_that_has_lost_it_was_not_asked_to(local: RunDirectory) -> None:
    started = start(local, "import os, time; r = os.environ['RANK']; time.sleep(0.3 * int(r)); os._exit(r == '0')")
    assert started.wait() == 1
    assert started.ended.tasks == (TaskEnd((0,), socket.gethostname(), "Exited with exit code 1"),)
    started = start(local, "import os, time; time.sleep(0.3 * (os.environ['RANK'] == '0')); os._exit(3)")
    assert started.wait() == 3
    assert [end.tasks for end in started.ended.tasks] == [(1,), (0,)]


WAITING = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(os.environ["RUN"]), os.environ["RANK"]
def note(number, frame):
    (folder / f"signal_{rank}").write_text(str(number))
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, note)
(folder / f"ready_{rank}").touch()
if rank == os.environ.get("FAILS"):
    while not all((folder / f"ready_{other}").exists() for other in range(2)):
        time.sleep(0.01)
    os._exit(9)
time.sleep(60)
"""


def test_the_first_failing_rank_ends_the_rest(local: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    began = time.monotonic()
    assert start(local, WAITING).wait() == 9
    assert (local.path / "signal_0").read_text() == str(int(signal.SIGTERM)), (
        "asked, so that it can write what it knows"
    )
    assert time.monotonic() - began < 20


def test_a_rank_that_does_not_listen_is_killed(local: RunDirectory) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os._exit(5) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    started = start(local, code)
    started.kill_after_s = 0.2
    assert started.wait() == 5
    assert all(process.returncode is not None for process in started.processes)


def test_what_a_rank_leaves_behind_is_killed(local: RunDirectory) -> None:
    # A shell that waits for a program of its own: a signal ends the shell alone.
    program = "sleep 600 & echo $! > $RUN/started; mv $RUN/started $RUN/pid; wait"
    code = f"import os; os.execvp('sh', ['sh', '-c', {program!r}])"
    started = start(local, code, num_ranks=1)
    wait_for((local.path / "pid").exists, within_s=60, what="the program", poll_s=0.02)
    left = int((local.path / "pid").read_text())
    assert os.getpgid(left) == started.processes[0].pid
    started.interrupt()
    assert started.wait() == 128 + signal.SIGUSR2
    wait_until_gone(left, within_s=60)


def test_a_stop_request_reaches_every_rank(local: RunDirectory) -> None:
    started = start(local, WAITING)
    wait_for(lambda: len(list(local.path.glob("ready_*"))) == 2, within_s=60, what="both ranks", poll_s=0.02)
    # Ctrl-C on the terminal does not reach them.
    assert all(os.getsid(process.pid) == process.pid for process in started.processes)
    started.interrupt()
    assert started.wait() == 75
    assert {path.read_text() for path in local.path.glob("signal_*")} == {str(int(signal.SIGUSR2))}


def test_ranks_that_started_before_one_that_could_not_are_ended(
    local: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def refuses_the_third(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(real(*words, **options))
        return started[-1]

    monkeypatch.setattr(ranks.subprocess, "Popen", refuses_the_third)
    with pytest.raises(BlockingIOError):
        start_local(["sleep", "60"], run=local, attempt=0, num_ranks=3, env=dict(os.environ))
    assert [process.poll() for process in started] == [-signal.SIGKILL] * 2
