"""A run's part in a job that it shares with other runs of a sweep (`sweep.pack`).

Each run has its own supervisor, which uses only its run's share of the node and does not requeue the job, since that
would end the other runs. Its exit code says whether the run is to continue. When all supervisors have ended, the batch
script calls the supervisors of those runs once more, and the first of them requeues the job for all. Runs that are
finished, or have stopped for good, end at once in the job's next start.
"""

from __future__ import annotations

from slurm_train.rundir.jobs import left_jobs
from slurm_train.rundir.ledger import Action, Attempt, Reason, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.actions import Decision, is_over_its_limit
from slurm_train.supervise.best_effort import BestEffort
from slurm_train.supervise.decision import FIRST_DELAY_S
from slurm_train.supervise.job import SlurmJob

BACK = "back"
"""Value in place of a share (`slurm.pack_slot.PACK`): all runs of the pack have ended, and this one is to continue."""


class PackedJob(SlurmJob):
    """The Slurm job of a pack, as the supervisor of one of its runs sees it."""

    is_shared = True

    def has_left(self) -> bool:
        """Returns whether the run has stopped for good in an earlier start of this job."""
        return self.job_id in left_jobs(self._run, [self.job_id], read_ledger(self._run))

    def requeue(self, _decision: Decision) -> bool:
        """Does nothing: the job is requeued when all runs of the pack have ended, if exit codes ask for it."""
        return True

    def wait_for_requeue(self, decision: Decision) -> None:
        """Returns at once: the batch script waits for this process."""


def return_of(run: RunDirectory, job: SlurmJob) -> Decision:
    """Returns the decision about a run of a pack that has saved and ended, as its ledger says.

    It is to requeue, also where that is not known; not for a run that a person has stopped.
    """
    record = job.show()
    is_over = record is not None and is_over_its_limit(record)
    ledger = BestEffort()("the ledger", lambda: read_ledger(run), list[Attempt]())
    end = ledger[-1].end if ledger else None
    is_left = BestEffort()("the STOP file", lambda: job.job_id in left_jobs(run, [job.job_id], ledger), default=False)
    if is_left:
        return Decision(Reason.STOPPED if end is None else end.reason, Action.STOP, "" if end is None else end.note)
    is_of_this_start = bool(ledger) and ledger[-1].start.job_start == job.job_start
    if end is None or end.reason is Reason.FILE_SYSTEM or not is_of_this_start:
        # Its attempt could not be opened or closed; later that may be possible.
        note = "the run could not write its files"
        return Decision(Reason.FILE_SYSTEM, Action.REQUEUE, note, is_over=is_over, delay_s=FIRST_DELAY_S)
    return Decision(end.reason, Action.REQUEUE, end.note, exclude=end.failed_on, is_over=is_over)
