from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.jobs import ask_to_stop, left_jobs, record_job
from slurm_train.rundir.ledger import Action, Reason, Start, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.allocation import Allocation
from slurm_train.status.run_status import read_files
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.job import SlurmJob
from slurm_train.supervise.nodes import NodePool
from slurm_train.supervise.pack import PackedJob, return_of
from slurm_train.supervise.requeue import carry_out
from slurm_train.supervise.srun import SrunStep
from slurm_train.supervise.supervisor import Supervisor
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.support.ledgers import close_attempt, ledger_lines


class Pack:
    """A run in a job that it shares, at a start of this job."""

    def __init__(self, folder: Path, *, restart_count: int = 0) -> None:
        self.run = RunDirectory(folder)
        self.commands = FakeSlurmCommands(fields={"7_1": {"JobState": "RUNNING", "Restarts": str(restart_count)}})
        self.allocation = Allocation(
            requeue_id="7_1", restart_count=restart_count, nodes=("node1",), tasks_per_node=(4,)
        )

    def job(self, kind: type[SlurmJob] = PackedJob) -> SlurmJob:
        job = kind(self.run, self.allocation, {}, retry_s=0.0)
        job.commands = self.commands
        return job

    def step(self) -> SrunStep:
        pool = NodePool.whole(self.allocation)
        return SrunStep(self.run, RunConfig(), self.job(), pool=pool, command=["srun"], env={})

    def ends(self, **facts: object) -> None:
        start = Start(job_id="7_1", restart_count=self.allocation.restart_count, nodes=("node1",), world_size=1)
        close_attempt(self.run, open_attempt(self.run, start), facts)


def test_a_supervisor_in_a_pack_does_not_requeue_the_job(tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    assert carry_out(pack.run, pack.job(), Decision(Reason.PREEMPTED, Action.REQUEUE, "preempted")) == 75
    assert pack.commands.requeued == []


def test_the_steps_of_the_runs_of_a_pack_have_different_names(tmp_path: Path) -> None:
    names = {Pack(tmp_path / run_id).step().step_name(0) for run_id in ("3f9a", "77b1")}
    assert names == {"attempt_0.3f9a", "attempt_0.77b1"}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"reason": "time_limit", "note": "as said"}, Decision(Reason.TIME_LIMIT, Action.REQUEUE, "as said")),
        ({"reason": "failed", "failed_on": "node1"}, Decision(Reason.FAILED, Action.REQUEUE, "", exclude=("node1",))),
        (
            {"reason": "file_system"},
            Decision(Reason.FILE_SYSTEM, Action.REQUEUE, "the run could not write its files", delay_s=60),
        ),
    ],
)
def test_a_run_comes_back_as_its_ledger_says(facts: dict[str, str], expected: Decision, tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    pack.ends(action="requeue", **facts)
    assert return_of(pack.run, pack.job(SlurmJob)) == expected


@pytest.mark.parametrize("action", ["stop", "requeue"])
def test_a_run_that_a_person_has_stopped_does_not_bring_its_pack_back(action: str, tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    pack.ends(action=action, reason="stopped")
    if action == "requeue":
        # Cancelled after it had ended at a preemption.
        ask_to_stop(pack.run, ["7_1"], newest_job=7)
    assert return_of(pack.run, pack.job(SlurmJob)).action == "stop"


def test_a_run_that_could_open_no_attempt_comes_back_later(tmp_path: Path) -> None:
    Pack(tmp_path).ends(action="requeue", reason="preempted")
    assert return_of(tmp_run := RunDirectory(tmp_path), Pack(tmp_path, restart_count=1).job(SlurmJob)).delay_s == 60
    assert len(ledger_lines(tmp_run)) == 1


def test_a_run_that_has_stopped_for_good_does_not_start_again_with_its_pack(tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    record_job(pack.run, "7_1", is_packed=True)
    assert not pack.job().has_left()
    pack.ends(action="stop", reason="failed")
    later = Pack(tmp_path, restart_count=1)
    assert later.job().has_left()
    # It would fail if it were started: there is no srun.
    assert Supervisor(later.run, later.job(), later.step(), RequeueSection()).supervise() == 1
    assert len(read_ledger(later.run)) == 1
    # Another job is another matter: a person has resumed the run.
    record_job(pack.run, "8")
    assert left_jobs(pack.run, ["7_1"], read_ledger(pack.run)) == {"7_1"}


def test_a_run_that_was_cancelled_while_its_pack_waits_has_left_it(tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    record_job(pack.run, "7_1", is_packed=True)
    ask_to_stop(pack.run, ["7_1"], newest_job=7)
    assert pack.job().has_left()


def test_a_job_of_its_own_is_never_left(tmp_path: Path) -> None:
    pack = Pack(tmp_path)
    record_job(pack.run, "7_1")
    pack.ends(action="stop", reason="failed")
    assert read_files(pack.run).left_jobs == frozenset()
