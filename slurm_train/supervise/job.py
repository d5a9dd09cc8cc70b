"""The job of a supervisor: its questions and requests to Slurm about it. A run on this machine has no job.

A restart of slurmctld must not end a run: while slurmctld does not answer, the question is repeated for some minutes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from slurm_train.errors import ClusterError
from slurm_train.rundir.jobs import Holder, this_process
from slurm_train.rundir.ledger import Action, Reason, read_ledger
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import Notice
from slurm_train.slurm.allocation import Allocation, cluster_of, het_job_ids
from slurm_train.slurm.commands import ControllerAway, SlurmCommands
from slurm_train.slurm.policy import read_preemption, requeue_delay_s, returning_codes
from slurm_train.slurm.records import (
    JobState,
    end_and_limit,
    queue_seconds,
    restarts_of,
    unix_s,
    waits_for_nodes,
)
from slurm_train.slurm.site import Site, preemption_in
from slurm_train.status.activity import holder_lives, newest_job
from slurm_train.supervise.actions import Decision, is_over_its_limit
from slurm_train.supervise.best_effort import say
from slurm_train.supervise.continuation import exclude_nodes, is_cancelled, submit_continuation

T = TypeVar("T")

_RETRY_S = 120.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_CONFIRM_LOOKS = 5
_WAITS_FOR_ITS_TIME_S = 600.0
"""A job whose begin time is this near counts as waiting; that of a requeued job is two minutes ahead by default."""
_WRITTEN_AFTER_S = 7.0
"""slurmctld writes changes into its state files within 5 s; before that, a crash loses them."""


class Job:
    """No job: the ranks run on this machine, and nothing is requeued.

    Args:
        env: environment for Slurm's commands, which are needed since a job may hold the run.
        allocation: what Slurm has given to this process; None outside of jobs.
    """

    continues: str | None = None
    """The job that this one continues."""
    refusals: Sequence[str] = ()
    """Why the job could not be requeued, and no other one be submitted."""
    is_shared = False
    """Whether other runs have supervisors of their own in the same job."""

    def __init__(self, env: Mapping[str, str], allocation: Allocation | None = None) -> None:
        self.job_id = None if allocation is None else allocation.requeue_id
        self.restart_count = 0 if allocation is None else allocation.restart_count
        self.commands = SlurmCommands(env)
        self.holder = this_process(job_id=self.job_id, cluster="" if allocation is None else cluster_of(env))

    @property
    def job_start(self) -> tuple[str | None, int]:
        """This start of the job, as attempts name theirs."""
        return (self.job_id, self.restart_count)

    def is_alive(self, holder: Holder) -> bool:
        """Returns whether another holder of the run's lock still lives."""
        return holder_lives(holder, self.commands)

    def queue_s(self) -> float | None:
        """Returns the seconds that the job waited, from when it could have started; None if unknown."""
        return None

    def newest_job(self) -> int | None:
        """Returns the highest job number of this user that Slurm knows, None where it does not answer."""
        return None

    def show(self) -> dict[str, str] | None:
        """Returns this job's record, None where there is none or Slurm does not answer."""
        return None

    def past_ends(self, _job_id: str) -> Sequence[str]:
        """Returns the states in which the earlier starts of a job ended, oldest first; empty if unknown."""
        return ()

    def requeue(self, _decision: Decision) -> bool:
        """Requeues this job; returns whether Slurm confirmed it."""
        return False

    def wait_for_requeue(self, decision: Decision) -> None:
        """Waits until the requeue ends this process, or is certain."""
        wait_until_requeued(lambda: self.requeue(decision))

    def has_left(self) -> bool:
        """Returns whether the run has stopped for good in an earlier start of its job."""
        return False

    def resubmit(self, _decision: Decision) -> str:
        """Submits another job that continues the run after this one has ended; returns its id, "" where that failed."""
        return ""


class SlurmJob(Job):
    """The Slurm job that this process runs in.

    Args:
        run: the run.
        allocation: the job's.
        env: the job's environment.
        retry_s: seconds to retry while Slurm does not answer.
        continues: the job that this one continues.
        before_requeue: called before a requeue, since Slurm ends this process by it.
    """

    job_id: str

    def __init__(
        self,
        run: RunDirectory,
        allocation: Allocation,
        env: Mapping[str, str],
        *,
        retry_s: float,
        continues: str | None = None,
        before_requeue: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(env, allocation)
        # Steps and nodes of a heterogeneous job are known by the ids of all its components.
        self.job_ids = het_job_ids(env) or (self.job_id,)
        self.continues = continues
        self._run = run
        self._env = env
        self._retry_s = retry_s
        self._before_requeue = before_requeue
        self._site: dict[str, float | None] = {}

    def queue_s(self) -> float | None:
        """Asks Slurm, for ten seconds at most."""
        # Only a figure for the ledger, so a busy controller must not delay the start.
        commands = SlurmCommands(self._env, timeout_s=10.0)
        return _answer(lambda: queue_seconds(commands.show_job(self.job_id)), None)

    def newest_job(self) -> int | None:
        """Asks Slurm."""
        return newest_job(self.commands)

    def show(self) -> dict[str, str] | None:
        """Asks Slurm; retries while it does not answer."""
        ask = partial(self.commands.show_job, self.job_id)
        problem = f"Slurm does not give the record of job {self.job_id}"
        return _answer(lambda: ask_with_retries(ask, limit_s=self._retry_s), None, problem)

    def past_ends(self, job_id: str) -> Sequence[str]:
        """Asks accounting."""
        return _answer(lambda: self.commands.ended_states(job_id), ())

    def requeue(self, decision: Decision) -> bool:
        """Requeues the job, and delays it or excludes nodes as decided."""
        self._before_requeue()
        bring = partial(
            requeue_job,
            self.job_id,
            self.commands,
            restart_count=self.restart_count,
            is_over=decision.is_over,
            limit_s=self._retry_s,
        )
        is_requeued = self._try(bring, False, f"job {self.job_id} could not be requeued")
        # Slurm may end this process at any moment, so delay and exclusion are best effort.
        for job_id in self.job_ids if is_requeued else ():
            if decision.delay_s:
                put_off = partial(self.commands.put_off, job_id, decision.delay_s)
                _answer(put_off, None, f"job {job_id} may start again at once")
            if decision.exclude:
                exclude = partial(exclude_nodes, decision.exclude, job_id, self.commands)
                _answer(exclude, None, f"job {job_id} may get {','.join(decision.exclude)} again")
        return is_requeued

    def end_for_good(self, code: int) -> int:
        """Makes sure that a job that fails now ends, and that Slurm neither starts it again nor holds it for a person.

        Slurm holds a job with --requeue=expedite that fails on nodes without a fault. Sites requeue or hold jobs by
        their exit codes, also those that may not be requeued (22.05). A job that was requeued, or that somebody else
        ends, is not changed.

        Args:
            code: the exit code that the job is to have.

        Returns:
            That code, or another one where the site requeues or holds jobs that end with it.
        """
        unknown: dict[str, str] = {}
        job = _answer(lambda: self.commands.show_job(self.job_id), unknown)
        if job.get("JobState") != "RUNNING" or restarts_of(job) != self.restart_count:
            return code
        if job.get("ExpeditedRequeue") == "Yes":
            problem = f"Slurm may hold job {self.job_id} as REQUEUE_HOLD: `scancel {self.job_id}` ends it"
            _answer(lambda: self.commands.forbid_requeue(self.job_id), None, problem)
        taken = returning_codes(_answer(self.commands.show_config, unknown))
        # The code of a run that shares its job tells the batch script whether the run goes on.
        if code not in taken or self.is_shared:
            return code
        free_code = next((number for number in range(1, 126) if number not in taken), code)
        say(f"this site starts or holds jobs that end with {code} (RequeueExit): the job ends with {free_code}")
        return free_code

    def resubmit(self, decision: Decision) -> str:
        """Submits the run's script once more."""
        submit = partial(submit_continuation, self._run, self.job_id, exclude=decision.exclude, env=self._env)
        return self._try(submit, "", "no other job could be submitted")

    def _try(self, request: Callable[[], T], default: T, problem: str) -> T:
        """Returns Slurm's answer to a request, `default` where it refuses, which is kept in `refusals`."""
        try:
            return request()
        except ClusterError as err:
            self.refusals = (*self.refusals, f"{problem}: {err.message}")
            say(self.refusals[-1])
            return default

    def has_left(self) -> bool:
        """Reads the ledger; where Slurm had not said why the ranks were to stop, the decision to stop was none."""
        of_job = [attempt for attempt in read_ledger(self._run) if attempt.start.job_id == self.job_id]
        if not of_job or of_job[-1].start.restart_count >= self.restart_count:
            return False
        return of_job[-1].action is Action.STOP and of_job[-1].reason is not Reason.UNKNOWN

    def is_predecessor_cancelled(self) -> bool:
        """Returns whether the job that this one is to continue was cancelled, as far as Slurm knows."""
        if self.continues is None:
            return False
        ask = partial(is_cancelled, self.continues, self.commands)
        return _answer(lambda: ask_with_retries(ask), False)

    def waiting_for(self, nodes: Sequence[str]) -> list[str]:
        """Returns the jobs that would take these nodes if they were free."""
        partitions = self.commands.partitions_of(nodes)
        return [
            job.job_id
            for job in self.commands.waiting_jobs()
            if partitions.intersection(job.partition.split(",")) and _is_next(job, now_unix_s=time.time())
        ]

    def may_be_preempted(self) -> bool:
        """Returns whether jobs of this one's QOS and partition may lose their nodes to others.

        Raises:
            ClusterError: Slurm does not answer.
        """
        job = self.commands.show_job(self.job_id)
        facts = Site(self.commands).facts()
        return preemption_in(facts, job.get("QOS", ""), job.get("Partition", "")).outcome != "never"

    def requeue_delay_s(self) -> float:
        """Returns how long Slurm lets a requeued job wait, by default until credentials of its earlier start are void.

        Raises:
            ClusterError: Slurm does not answer.
        """
        return requeue_delay_s(self.commands.show_config())

    def is_halted(self) -> bool:
        """Returns whether the processes of the job's steps are stopped by Slurm, as `scancel --signal=STOP` does.

        Where it does not answer in five seconds that is not known, and hung ranks are not kept for it.
        """
        commands = SlurmCommands(self._env, timeout_s=5.0)
        return _answer(lambda: commands.show_job(self.job_id).get("JobState", ""), "") in ("STOPPED", "SUSPENDED")

    def notice(self) -> Notice:
        """Returns when the job ends, and how the site ends jobs; the latter is asked once, since it does not change.

        Raises:
            ClusterError: Slurm does not answer.
        """
        job = self.commands.show_job(self.job_id)
        if not self._site:
            settings = self.commands.show_config()
            partition = self.commands.show_partition(job.get("Partition", ""))
            preemption = read_preemption(settings, qos=self.commands.show_qos(job.get("QOS", "")), partition=partition)
            self._site = {"kill_wait_s": preemption.kill_wait_s, "grace_s": preemption.grace_s}
        end_unix_s, limit_s = end_and_limit(job)
        return Notice(end_unix_s=end_unix_s, limit_s=limit_s, **self._site)


def _is_next(job: JobState, *, now_unix_s: float) -> bool:
    """Returns whether a waiting job would start soon if it had nodes."""
    if job.reason == "BeginTime":
        start_unix_s = unix_s(job.start)
        return start_unix_s is None or start_unix_s < now_unix_s + _WAITS_FOR_ITS_TIME_S
    return waits_for_nodes(job.reason)


def _answer(ask: Callable[[], T], default: T, problem: str = "") -> T:
    """Returns Slurm's answer, `default` where it refuses or does not answer; then `problem` is printed, if given."""
    try:
        return ask()
    except ClusterError as err:
        if problem:
            say(f"{problem}: {err.message}")
        return default


def ask_with_retries(
    ask: Callable[[], T], *, limit_s: float = _RETRY_S, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Returns the first answer; the pause between two tries grows.

    Args:
        ask: raises ControllerAway while Slurm does not answer; anything else it raises is final.
        limit_s: seconds after which the last ControllerAway is raised; tries themselves take time as well.
        sleep: waits for a number of seconds.

    Raises:
        ControllerAway: there was no answer in time.
    """
    deadline = time.monotonic() + limit_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return ask()
        except ControllerAway:
            if time.monotonic() + pause_s > deadline:
                raise
        sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def requeue_job(
    job_id: str,
    commands: SlurmCommands,
    *,
    restart_count: int,
    is_over: bool = False,
    limit_s: float = _RETRY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeues a job and returns whether Slurm confirms that it was restarted; retries while Slurm does not answer.

    An answer may be lost although the requeue happened, and somebody may have cancelled the job meanwhile, so its
    record is read before every try. The plain form of requeue would restart a cancelled job as well. It is used only
    right after the record said that the time limit has ended this start of the job.

    Args:
        job_id: array-safe id.
        commands: Slurm.
        restart_count: how often the job had been restarted when this attempt began.
        is_over: the job is over its time limit, where the careful form of the call does nothing.
        limit_s: seconds during which it is tried again.
        sleep: waits for a number of seconds.

    Raises:
        ClusterError: Slurm refused, or did not answer in time.
    """

    def ask() -> bool:
        job = commands.show_job(job_id)
        if restarts_of(job) > restart_count:
            return True
        if is_over and not is_over_its_limit(job):
            return False
        try:
            commands.requeue(job_id, is_over=is_over)
        except ControllerAway:
            raise
        except ClusterError:
            # The cause may be --no-requeue, or the site's default; the owner may allow requeues afterwards.
            commands.allow_requeue(job_id)
            commands.requeue(job_id, is_over=is_over)
        for _ in range(_CONFIRM_LOOKS):
            if commands.restarts(job_id) > restart_count:
                return True
            sleep(0.5)
        return False

    return ask_with_retries(ask, limit_s=limit_s, sleep=sleep)


def wait_until_requeued(
    requeue: Callable[[], bool],
    *,
    limit_s: float = 60.0,
    written_after_s: float = _WRITTEN_AFTER_S,
    pause_s: float = 2.0,
) -> None:
    """Waits until Slurm kills this process, or the requeue is certainly in Slurm's state files.

    If the script ends before Slurm has requeued the job, Slurm records the job as finished. And if slurmctld is killed
    right after it requeued the job, it restarts with the job running, as in its state files. Then the requeue is asked
    for once more, for as long as this process lives, which is KillWait after the requeue.

    Args:
        requeue: requeues the job if necessary; returns whether Slurm has confirmed it.
        limit_s: seconds after which the wait ends in any case.
        written_after_s: seconds for which Slurm must have confirmed the requeue.
        pause_s: seconds between two looks.
    """
    begin_s = time.monotonic()
    sure_s = begin_s + written_after_s
    while time.monotonic() < begin_s + limit_s:
        signal.sigtimedwait([signal.SIGINT], min(pause_s, limit_s))
        look_s = time.monotonic()
        is_confirmed = requeue()
        if is_confirmed and look_s >= sure_s:
            return
        if not is_confirmed:
            sure_s = time.monotonic() + written_after_s
