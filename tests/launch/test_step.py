from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.launch.step import end_step, run_step
from slurm_train.slurm.records import violent_end
from tests.fakes.slurm_commands import FakeSlurmCommands


def ran(tmp_path: Path, program: str, *, is_overdue: bool = False) -> tuple[int, str]:
    log = tmp_path / "batch.log"
    with log.open("ab") as file:
        code = run_step([sys.executable, "-S", "-c", program], env=os.environ, log=file, is_overdue=lambda: is_overdue)
    return code, log.read_text()


def test_a_step_ends_with_its_code(tmp_path: Path) -> None:
    assert ran(tmp_path, "import sys; print('said'); sys.exit(3)") == (3, "said\n")


def test_an_srun_that_is_killed_says_so_for_the_ledger(tmp_path: Path) -> None:
    code, log = ran(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 137 and violent_end(log) == "srun itself was killed by signal 9"


def test_an_srun_that_missed_the_end_is_ended(tmp_path: Path) -> None:
    code, log = ran(tmp_path, "import signal; signal.pause()", is_overdue=True)
    assert code == 137 and log == ""


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
