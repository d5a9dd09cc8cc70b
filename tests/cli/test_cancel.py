from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.jobs import Holder, take_lock


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "COMPLETING"])
def test_an_active_job_is_cancelled(word: str, shell: Any) -> None:
    run = shell.has_run(job_ids=("11", "12"))
    shell.slurm.queue("12", word)
    done = shell.types("cancel", "3f9a1c07")
    assert done.code == 0
    assert run.stop_file.exists(), "a job that is being submitted meanwhile must not take over"
    assert shell.slurm.said("cancelled") == "12\n", "the newest job only"
    assert "cancelled job 12 of gpt-stdlib/3f9a1c07; `resume 3f9a1c07` continues it" in done.err


def test_a_job_that_waits_to_take_over_is_cancelled_with_the_one_that_runs(shell: Any) -> None:
    run = shell.has_run(job_ids=("11", "12"))
    run.job.write_text(json.dumps({"job_ids": ["11", "12"], "submit_time_unix_s": 1.0, "continues": {"12": "11"}}))
    shell.slurm.queue("11", "COMPLETING")
    shell.slurm.queue("12", "PENDING")
    assert shell.types("cancel", "3f9a1c07").code == 0
    assert shell.slurm.said("cancelled") == "12 11\n"


def test_every_active_job_is_cancelled_not_the_newest_alone(shell: Any) -> None:
    run = shell.has_run(job_ids=("11", "12", "13"))
    for job_id, word in (("11", "RUNNING"), ("12", "FAILED"), ("13", "PENDING")):
        shell.slurm.queue(job_id, word)
    done = shell.types("cancel", "3f9a1c07")
    assert done.code == 0 and shell.slurm.said("cancelled") == "13 11\n"
    assert json.loads(run.stop_file.read_text()) == {"jobs": ["11", "13"], "newest_job": 13}


def test_a_job_that_nobody_recorded_is_found_by_the_lock_and_by_its_script(shell: Any) -> None:
    run = shell.has_run(job_ids=("11",))
    take_lock(run, Holder(job_id="20", host="node1", pid=5, started="1"), is_alive=lambda _holder: True)
    shell.slurm.has_script("21", run.submit_script)
    shell.slurm.has_script("22", run.logs / "submitted" / "x.sh")
    shell.slurm.has_script("23", run.path.with_name("3f9a1c070") / "submit.sh")
    for job_id in ("20", "21", "22", "23"):
        shell.slurm.queue(job_id, "PENDING")
    assert shell.types("cancel", "3f9a1c07").code == 0
    assert shell.slurm.said("cancelled") == "22 21 20\n"
    assert json.loads(run.stop_file.read_text())["newest_job"] == 23, "a job of this number is on its way already"


@pytest.mark.parametrize("job_ids", [(), ("12",)])
def test_a_run_that_is_not_active_is_an_error(job_ids: tuple[str, ...], shell: Any) -> None:
    shell.has_run(job_ids=job_ids)
    shell.slurm.account("12", "COMPLETED")
    done = shell.types("cancel", "gpt-stdlib")
    assert done.code == 2
    assert "gpt-stdlib/3f9a1c07 is neither queued nor running" in done.err
    assert shell.slurm.said("cancelled") is None


def test_without_slurm_nothing_is_queued(shell: Any) -> None:
    shell.has_run(job_ids=("12",))
    shell.leaves_slurm()
    assert "is neither queued nor running" in shell.types("cancel", "gpt-stdlib").err


def test_the_beginning_of_several_ids_cancels_nothing(shell: Any) -> None:
    shell.has_run("gpt", "3f9a1c07", job_ids=("12",))
    shell.has_run("gpt", "3f9abbbb", job_ids=("13",))
    shell.slurm.queue("12", "RUNNING")
    done = shell.types("cancel", "3f9a")
    assert done.code == 2 and "is the beginning of several run ids" in done.err
    assert shell.slurm.said("cancelled") is None


def test_a_run_on_this_machine_is_asked_to_stop(shell: Any) -> None:
    run = shell.has_run(cluster=False)
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[19]
    holder = Holder(job_id=None, host=socket.gethostname(), pid=trainer.pid, started=started)
    take_lock(run, holder, is_alive=lambda _holder: True)
    done = shell.types("cancel", "gpt-stdlib")
    assert trainer.wait(timeout=10) == -signal.SIGTERM
    assert done.code == 0 and "asked gpt-stdlib/3f9a1c07 to save and stop" in done.err


def test_a_run_on_another_machine_is_asked_by_file(shell: Any) -> None:
    run = shell.has_run(cluster=False)
    take_lock(run, Holder(job_id=None, host="elsewhere", pid=5, started="1"), is_alive=lambda _holder: True)
    assert shell.types("cancel", "gpt-stdlib").code == 0
    assert run.stop_file.exists()


def test_somebody_elses_process_is_not_ours_to_end(shell: Any) -> None:
    run = shell.has_run(cluster=False)
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    mine = Holder(job_id=None, host=socket.gethostname(), pid=os.getpid(), started=started)
    take_lock(run, mine, is_alive=lambda _holder: True)

    def refuse(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    shell.patch.setattr(os, "kill", refuse)
    done = shell.types("cancel", "gpt-stdlib")
    assert done.code == 2 and "belongs to another user" in done.err
