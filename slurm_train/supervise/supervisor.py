"""Supervises one attempt: opens it, runs the ranks, reads what they left, writes the ledger, acts on the decision.

Runs where the batch script runs: on the head node, outside any container, without torch. Everything is written before
`scontrol requeue` is called, because Slurm kills this process when it requeues the job. When the ranks have ended, any
file may be unreadable: each fact has a default, and the decision is made from what can be read. If a supervisor was
killed or lost with its node, the next one closes its attempt.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slurm_train.checkpoint.verify import committed_step_of_program, newest_committed_step
from slurm_train.code.snapshot import own_snapshot, require_sealed
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE, RunError
from slurm_train.metrics import last_numbers
from slurm_train.rundir.attempts import (
    Round,
    check_held,
    first_round,
    hold_run,
    let_go,
    newest_round,
    open_attempt,
    overtaken,
    publish_result,
    read_round,
)
from slurm_train.rundir.events import (
    FailureMark,
    leave_mark,
)
from slurm_train.rundir.files import NO_SUCH_CALL, change_times, is_there, listed, read_tail
from slurm_train.rundir.jobs import complete_stop, obey_stop, record_job, release_lock, take_lock
from slurm_train.rundir.ledger import NOT_REQUEUED, Action, Attempt, End, Reason, Start, read_ledger, record_end
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.scores import num_recorded
from slurm_train.rundir.signs import read_group, read_signs
from slurm_train.rundir.timing import last_step, read_account, step_of_attempt
from slurm_train.slurm.job_variables import node_name
from slurm_train.slurm.limits import read_limits
from slurm_train.slurm.records import TaskEnd, end_and_limit, state_in_batch_log
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.decision import (
    CANCELLED,
    Course,
    Decision,
    JobAtEnd,
    NodesAtEnd,
    Outcome,
    advice_on,
    course_of,
    decide,
    ends_without_progress,
    slurm_reason,
    starts_without_progress,
    used_up,
)
from slurm_train.supervise.evidence import (
    Diagnosis,
    Evidence,
    Surroundings,
    diagnose,
    read_evidence,
    silent_end,
    task_end,
    with_crash_place,
    with_missing_variable,
)
from slurm_train.supervise.notify import Event, Notifier
from slurm_train.supervise.own_end import EndKind, OwnEnd, judge, read_end
from slurm_train.supervise.scheduler import Scheduler
from slurm_train.supervise.silence import apart_sentence

_WRITER_WAIT_S = 60.0
_BATCH_LOG_BYTES = 64 * 1024
_MOST_FAILED_STARTS = 10
FIRST_DELAY_S = 60
"""How long a job waits after the first failure of the file system."""
_LONGEST_DELAY_S = 3600
# Errors that do not pass by themselves, besides those of calls that a file system does not have.
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_LOST_REASONS = {
    "NODE_FAIL": Reason.NODE_FAILURE,
    "BOOT_FAIL": Reason.NODE_FAILURE,
    "PREEMPTED": Reason.PREEMPTED,
    "TIMEOUT": Reason.TIME_LIMIT,
    "REQUEUED": Reason.REQUEUED,
    "CANCELLED": Reason.CANCELLED,
}

Launch = Callable[[int], int]
"""Runs the ranks of the attempt with this number and returns their exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How the ranks of an attempt ended, as far as that can be read."""

    attempt: int
    outcome: Outcome
    end: End
    """For the end line: exit code, steps, commit, where the time went, who asked for the stop, what was found."""
    earlier_ends: Mapping[str, int]
    """Earlier attempts in a row without a new checkpoint, by what ended them."""
    failed_on: tuple[str, ...]
    """The nodes that the attempt failed on, empty where that is not known."""
    lacks_room: bool
    """Whether the preflight has found too little free space on the disk."""
    not_saved: str
    """Why no save was made at the stop, for the note; "" where one was."""
    is_hung: bool
    """Whether the ranks were ended because they hung."""
    apart: str
    """Why the ranks of a script did not train one model, "" where nothing says so."""


def progress_of(run: RunDirectory, config: RunConfig) -> Callable[[], int | None]:
    """Returns the function by which `Supervisor` measures progress.

    The progress of a training is its newest checkpoint, that of an evaluator that follows a run the number of scores
    that it has recorded.
    """
    if config.train.follow is not None:
        return partial(num_recorded, run)
    return partial(newest_committed_step if config.trains else committed_step_of_program, run.checkpoints)


class Supervisor:
    """One job's work on a run, from the opening of its attempt to the requeue.

    Args:
        run: the run.
        scheduler: what started the job.
        settings: when to requeue and relaunch.
        committed_step: returns the step of the newest checkpoint, -1 if there is none, or another count by
            `progress_of`. The function, or its result, is None where checkpoints are not known, as of a user's own
            program that has saved none here. Then progress is the newest logged step, and the number of requeues has
            no limit.
        is_own_code: the ranks run a user's function or script, which writes no `result.json`. Whether such a run is
            finished when it ends with 0 is for `own_end.judge` to say.
        notify: sends messages to the person; None: no messages are sent.
    """

    def __init__(
        self,
        run: RunDirectory,
        scheduler: Scheduler,
        settings: RequeueSection,
        *,
        committed_step: Callable[[], int | None] | None = None,
        is_own_code: bool = False,
        notify: Notifier | None = None,
    ) -> None:
        self._run = run
        self._notify = notify
        self._scheduler = scheduler
        self._settings = settings
        self._committed_step = committed_step
        self._is_own_code = is_own_code
        self._job_id = scheduler.start.job_id
        self._restart_count = scheduler.start.restart_count

    def supervise(self, launch: Launch) -> int:
        """Runs one attempt, and further ones in the same allocation if ranks are relaunched; returns the exit code.

        Raises:
            RunError: another job or process runs this directory, a newer attempt has taken over meanwhile, or the
                directory was moved or removed.
        """
        run = self._run
        scheduler = self._scheduler
        job_id = self._job_id
        # A process that writes configuration or code holds the lock for a moment; a job waits for it.
        wait_s = _WRITER_WAIT_S if job_id is not None else 0.0
        hold_run(run)
        take_lock(run.lock, scheduler.holder, is_alive=scheduler.is_alive, wait_s=wait_s)
        try:
            start = self._start()
            # Only after the lock is taken: a job without the lock must not hide the job that has it.
            if job_id is not None:
                record_job(
                    run,
                    job_id,
                    cluster=scheduler.holder.cluster,
                    continues=scheduler.continues,
                    is_packed=scheduler.is_shared,
                )
            close_lost(run, start, past_ends=scheduler.past_ends, last_step=last_step(run))
            if is_there(run.result):
                say(f"{run.path} is finished already; see {run.result}")
                return EXIT_DONE
            refusal = obey_stop(run, job_id, continues=scheduler.continues, newest_job=scheduler.newest_job)
            if refusal:
                say(refusal)
                return EXIT_FAILURE
            if scheduler.has_left():
                # Also where a site requeues jobs by their exit code (RequeueExit).
                say(f"it has stopped in an earlier start of job {job_id}; `resume {run.run_id}` continues the run")
                return EXIT_FAILURE
            refusal = self._budget_used_up(start)
            if refusal:
                say(f"nothing is started: {refusal}")
                self._send("failed", f"nothing is started: {refusal}", attempt=max(existing_attempts(run), default=0))
                return EXIT_FAILURE
            while True:
                exit_code, decision = self._run_attempt(launch)
                if decision.action is not Action.RELAUNCH:
                    break
        finally:
            best_effort = BestEffort()
            if job_id is not None:
                best_effort("the STOP file", lambda: complete_stop(run, job_id, newest_job=scheduler.newest_job), None)
            # A lock that cannot be removed is taken over by this job's next start, or by any job after this one's end.
            best_effort("the lock", lambda: release_lock(run.lock, scheduler.holder), None)
            let_go(run)
        if decision.action is Action.REQUEUE and not scheduler.requeue(decision):
            return self._hand_over(decision)
        return self._act(decision, exit_code)

    def come_back_later(self, error: OSError) -> int:
        """Requeues a job that could not start its ranks, or lacked a file that it needs; returns the exit code.

        A full disk or a stale file handle may pass, so the job is requeued with a growing delay, ten times in a row.

        Raises:
            OSError: the error itself, where it does not pass by itself.
        """
        if isinstance(error, _LASTING) or error.errno in NO_SUCH_CALL or self._job_id is None:
            raise error
        ledger = BestEffort()("the ledger", lambda: read_ledger(self._run), None)
        # Without a ledger the number of tries is not known; the job tries again at long intervals.
        tries = _MOST_FAILED_STARTS // 2
        if ledger is not None:
            tries = starts_without_progress(ledger, job_id=self._job_id, restart_count=self._restart_count)
        problem = f"the run could not be started: {error}"
        if tries > _MOST_FAILED_STARTS:
            say(f"{problem}; that was start {tries} in a row, so the job ends; `resume` continues the run")
            return EXIT_FAILURE
        decision = _later(problem, tries)
        say(decision.note)
        return self.come_back(decision)

    def come_back(self, decision: Decision) -> int:
        """Requeues the job as decided, or submits another one that continues the run; returns the exit code."""
        if self._scheduler.requeue(decision):
            return self._act(decision, EXIT_FAILURE)
        return self._hand_over(decision)

    def _start(self) -> Start:
        return replace(self._scheduler.start, first_committed=self._committed())

    def _committed(self) -> int | None:
        """Returns the step of the newest checkpoint; None if it is unknown or cannot be read."""
        if self._committed_step is None:
            return None
        return BestEffort()("the checkpoints", self._committed_step, None)

    def _budget_used_up(self, start: Start) -> str:
        """Returns why a job that Slurm has restarted by itself must not go on, "" where it may; writes it down."""
        ledger = read_ledger(self._run)
        if self._restart_count == 0 or start.first_committed is None or not ledger:
            return ""
        newest = ledger[-1]
        end = newest.end or End(time_unix_s=newest.last_unix_s)
        refusal = used_up(
            ends_without_progress(ledger),
            reason=end.reason,
            max_returns=self._settings.max_returns_without_progress,
            course=course_of(newest),
        )
        if refusal:
            end = replace(end, action=Action.STOP, note=f"{end.reason}; {refusal}")
            record_end(self._run, newest.number, end)
        return refusal

    def _run_attempt(self, launch: Launch) -> tuple[int, Decision]:
        """Runs the ranks once; on return the ledger has both lines of the attempt, unless the second write failed."""
        run = self._run
        is_first_here = all(not self._is_of_this_start(earlier) for earlier in read_ledger(run))
        # Ranks that are started again in the same allocation have not waited in the queue.
        queue_s = self._scheduler.queue_s() if is_first_here else 0.0
        start_unix_s = time.time()
        start = self._start()
        attempt = open_attempt(run, start)
        opening = Round(world_size=start.world_size, first_step=last_step(run), start_unix_s=start_unix_s)
        oom_kills_before = self._scheduler.num_oom_kills()
        try:
            exit_code = launch(attempt)
        except OSError as err:
            unstarted = End(
                time_unix_s=time.time(),
                reason=Reason.FILE_SYSTEM,
                action=Action.REQUEUE,
                note=f"the run could not be started: {err}",
            )
            BestEffort()("the ledger", lambda: record_end(run, attempt, unstarted), None)
            raise
        # From here to the requeue nothing may raise, and no read or write may block for ever.
        best_effort = BestEffort()
        moved = best_effort("the run directory", lambda: _moved(run), None)
        if moved is not None:
            raise moved
        had_oom_kill = self._scheduler.num_oom_kills() > oom_kills_before
        end = self._look_back(attempt, opening, exit_code, best_effort, had_oom_kill=had_oom_kill)
        decision = self._decide(end)
        if end.apart:
            decision = replace(decision, note=f"{decision.note}; {end.apart}")
        growth = end.outcome.growth if decision.reason is Reason.GROWTH else None
        closing = replace(
            end.end,
            time_unix_s=time.time(),
            seconds=end.end.seconds if queue_s is None else {**end.end.seconds, "queue_s": queue_s},
            reason=decision.reason,
            action=decision.action,
            note=decision.note + end.not_saved,
            failed_on=end.failed_on if decision.reason is Reason.FAILED else (),
            left_out=decision.left_out,
            grow_to=None if growth is None else growth.nodes,
            pays_after_s=None if growth is None else growth.pays_after_s,
        )
        best_effort("the ledger", lambda: record_end(run, end.attempt, closing), None)
        say(f"attempt {end.attempt}: {decision.note}")
        self._notify_of_end(end, decision, best_effort)
        return exit_code or end.outcome.exit_code, decision

    def _notify_of_end(self, end: _End, decision: Decision, best_effort: BestEffort) -> None:
        """Sends the messages that an end calls for."""
        if self._notify is None:
            return
        note = decision.note
        attempt = end.attempt
        if end.is_hung:
            self._send("hung", note, attempt=attempt, once=f"attempt {attempt}")
        if decision.action is Action.FINISH:
            self._send("finished", note, attempt=attempt)
        elif decision.action is Action.STOP and decision.reason not in (Reason.CANCELLED, Reason.STOPPED):
            self._send("failed", note, attempt=attempt, once=f"attempt {attempt}")
        elif decision.action in (Action.REQUEUE, Action.LEAVE):
            ledger = best_effort("the ledger", lambda: read_ledger(self._run), list[Attempt]())
            interrupted = [attempt for attempt in ledger if attempt.reason is not Reason.GROWTH]
            returns = sum(attempt.action in (Action.REQUEUE, Action.LEAVE, Action.LOST) for attempt in interrupted)
            if returns > self._settings.notify_after:
                self._send("requeued", f"for the {returns}. time: {note}", attempt=attempt)

    def _send(self, event: Event, note: str, *, attempt: int, once: str = "") -> None:
        if self._notify is not None:
            self._notify(event, note=note, job_id=self._job_id, attempt=attempt, once=once)

    def _look_back(
        self, first_attempt: int, opening: Round, exit_code: int, best_effort: BestEffort, *, had_oom_kill: bool
    ) -> _End:
        """Returns what can be read of an attempt whose ranks have ended.

        Raises:
            RunError: a newer attempt has taken over; after a node loss this process may still run beside the newer one.
        """
        run = self._run
        scheduler = self._scheduler
        job = scheduler.show_job()
        # torchrun restarts failed ranks by itself; then the newest of its rounds is the attempt that has ended.
        attempt = best_effort("the attempts", lambda: newest_round(run, first_attempt), first_attempt)
        if attempt != first_attempt:
            opening = best_effort("the attempt", lambda: read_round(run, attempt), None) or opening
        newest = best_effort("the attempts", lambda: max(existing_attempts(run)), attempt)
        if newest > attempt:
            raise overtaken(run, attempt, newest)
        evidence = read_evidence(
            run,
            attempt,
            opening,
            best_effort,
            exit_code=exit_code,
            last_committed=self._committed(),
            has_account=not self._is_own_code,
        )
        has_failed = exit_code not in (EXIT_DONE, EXIT_REQUEUE)
        mark = str(evidence.mark or "") if has_failed else ""
        around = self._read_surroundings(
            attempt, job, best_effort, mark=mark, marks=evidence.marks, had_oom_kill=had_oom_kill
        )
        diagnosis = diagnose(evidence, around, has_failed=has_failed)
        stop_asked = best_effort("the STOP file", lambda: is_there(run.stop_file), False)
        kind, ended_early = self._judge(evidence, around, job, best_effort, stop_asked=stop_asked)
        apart = self._publish(attempt, best_effort) if kind is EndKind.FINISHED else ""
        outcome = Outcome(
            exit_code=EXIT_REQUEUE if kind is EndKind.STOPPED else diagnosis.exit_code,
            is_finished=kind is EndKind.FINISHED or best_effort("the result", lambda: is_there(run.result), False),
            ended_early=ended_early,
            stop_asked=stop_asked,
            asked_by=evidence.end.asked_by,
            cause=diagnosis.cause,
            growth=scheduler.growth,
            limits=read_limits(),
            settings=self._settings,
            job=self._job_at_end(job, evidence, diagnosis),
            nodes=self._nodes_for(around.lost_nodes, diagnosis.to_avoid),
            course=self._course(evidence, is_repeated=diagnosis.is_repeated),
        )
        return _End(
            attempt=attempt,
            outcome=outcome,
            end=evidence.end,
            earlier_ends=evidence.earlier_ends,
            failed_on=diagnosis.failed_on,
            lacks_room=diagnosis.lacks_room,
            not_saved=best_effort("the event of the stop", lambda: evidence.not_saved, ""),
            is_hung=bool(evidence.hang),
            apart=apart,
        )

    def _job_at_end(self, job: Mapping[str, str] | None, evidence: Evidence, diagnosis: Diagnosis) -> JobAtEnd:
        return JobAtEnd(
            is_slurm=self._job_id is not None,
            record=job,
            restart_count=self._restart_count,
            is_early=job is not None and self._is_early(job, evidence.end.time_unix_s),
            can_relaunch=self._can_relaunch(diagnosis, had_joined=evidence.had_joined, is_hung=bool(evidence.hang)),
        )

    def _read_surroundings(
        self,
        attempt: int,
        job: Mapping[str, str] | None,
        best_effort: BestEffort,
        *,
        mark: str,
        marks: Sequence[FailureMark],
        had_oom_kill: bool,
    ) -> Surroundings:
        """Returns what Slurm and the kernel report of an attempt whose ranks have ended.

        Args:
            attempt: its number.
            job: the record of the job, as far as known.
            best_effort: bounds the time of each read.
            mark: of the rank that failed first, in words.
            marks: of all ranks, the earliest first.
            had_oom_kill: whether the kernel of this node ended a process for lack of memory.
        """
        run = self._run
        scheduler = self._scheduler
        said = best_effort("the output of srun", lambda: scheduler.explain(attempt), "")
        placed_end = best_effort("the log of the rank", lambda: with_crash_place(said, run, attempt), said)
        # Where srun says nothing, torchrun's launcher has left a mark of a rank that a signal ended.
        placed_mark = best_effort("the log of the rank", lambda: with_crash_place(mark, run, attempt), mark)
        if self._job_id is not None:
            mark = placed_mark
            placed_mark = best_effort("the log", lambda: with_missing_variable(mark, run, attempt), mark)
        ends = best_effort("the output of srun", lambda: tuple(scheduler.ends(attempt)), tuple[TaskEnd, ...]())
        num_ranks = scheduler.start.world_size

        def read_own_words() -> str:
            first = first_round(run, attempt)
            return scheduler.own_words(attempt) or task_end(run, first, scheduler.tasks(attempt))

        def read_silent_end() -> str:
            return silent_end(run, attempt, ends, marks=marks, num_ranks=num_ranks)

        return Surroundings(
            violent_end=placed_end,
            placed_mark=placed_mark,
            own_words=best_effort("the output of srun", read_own_words, ""),
            ends=ends,
            silent_end=best_effort("the log of the rank", read_silent_end, ""),
            lost_nodes=tuple(scheduler.lost_nodes(job)),
            had_oom_kill=had_oom_kill,
            head_node=scheduler.start.nodes[0],
        )

    def _course(self, evidence: Evidence, *, is_repeated: bool) -> Course:
        """Returns the course of the run up to the attempt that has ended."""
        lacks_progress = not evidence.attempt.made_progress
        is_known = not self._is_own_code or evidence.end.last_committed is not None
        earlier_ends = evidence.earlier_ends
        return Course(
            failures_without_progress=earlier_ends["failed"] + 1 if lacks_progress else 0,
            earlier_ends=earlier_ends if lacks_progress and is_known else None,
            is_repeated=is_repeated,
            summary=course_of(evidence.attempt),
        )

    def _judge(
        self,
        evidence: Evidence,
        around: Surroundings,
        job: Mapping[str, str] | None,
        best_effort: BestEffort,
        *,
        stop_asked: bool,
    ) -> tuple[EndKind | None, str]:
        """Returns what it means that a user's own code has ended with 0, and why it was early; None of other ends."""
        if not self._is_own_code or evidence.end.exit_code != EXIT_DONE or around.lost_nodes:
            return None, ""
        by_slurm = None if job is None else slurm_reason(job, self._restart_count)
        if job is not None and by_slurm is None and job.get("JobState") != "RUNNING":
            # srun ends with 0 after a node failure, too; the job's state tells the two apart.
            return None, ""
        was_asked = bool(stop_asked or by_slurm or evidence.end.asked_by or self._scheduler.growth)
        ledger = [*evidence.ledger, evidence.attempt]
        end = best_effort(
            "the end of the program",
            lambda: read_end(self._run, evidence.number, ledger, was_asked=was_asked),
            OwnEnd(was_asked=was_asked),
        )
        return judge(end)

    def _publish(self, attempt: int, best_effort: BestEffort) -> str:
        """Writes the result of a user's own code; returns why its ranks did not train one model, "" for nothing."""
        run = self._run
        result: dict[str, float | str | None] = {"exit_code": 0, "attempt": attempt, "time_unix_s": time.time()}
        result |= best_effort("the metrics", lambda: last_numbers(run.metrics), dict[str, float | None]())
        apart = best_effort("the ranks", lambda: apart_sentence(read_signs(run, attempt), read_group(run, attempt)), "")
        if apart:
            result["remark"] = apart
        best_effort("the result", lambda: publish_result(run, attempt, result), None)
        return apart

    def _can_relaunch(self, diagnosis: Diagnosis, *, had_joined: bool, is_hung: bool) -> bool:
        """Returns whether the ranks may be started again in this allocation."""
        if not (self._settings.enabled and self._scheduler.can_relaunch):
            return False
        # A user's own code that failed resumes if it has joined the session. Code that hung is started again as after a
        # preemption. If the nodes were found unfit, the code has not run at all.
        return not self._is_own_code or had_joined or is_hung or not diagnosis.had_begun

    def _nodes_for(self, lost: tuple[str, ...], to_avoid: tuple[str, ...]) -> NodesAtEnd:
        """Returns the nodes to leave out, if the job can run without them, and those to use instead."""
        next_nodes = tuple(self._scheduler.nodes_without(to_avoid))
        can_avoid = bool(to_avoid) and (bool(next_nodes) or self._scheduler.can_avoid(to_avoid))
        return NodesAtEnd(lost=lost, bad=to_avoid if can_avoid else (), next=next_nodes)

    def _is_early(self, job: Mapping[str, str], now_unix_s: float) -> bool:
        """Returns whether a job's limit is further away than any warning of it: `auto` is at most half of the limit."""
        end_unix_s, limit_s = end_and_limit(job)
        if end_unix_s is None or limit_s is None:
            return False
        warning = self._settings.warn_before_limit_s
        lead_s = max(limit_s / 2, warning if isinstance(warning, int) else 0.0)
        # Slurm may send the warning a minute early.
        return end_unix_s - now_unix_s > 60.0 + lead_s

    def _decide(self, end: _End) -> Decision:
        """Returns what follows; if ranks are to be relaunched, the nodes are free for them when it returns."""
        decision = decide(end.outcome)
        cause = end.outcome.cause
        # `cancel` leaves a STOP file as well, and a job that was being preempted does not show that it was cancelled.
        may_be_cancelled = decision.action is Action.REQUEUE or decision.reason is Reason.STOPPED
        if may_be_cancelled and self._is_cancelled(end.outcome.job.record):
            return CANCELLED
        # A job that Slurm has restarted and that found too little free space on the disk waits for space.
        tries = end.earlier_ends.get("file_system", 0) + 1
        may_wait = self._settings.enabled and self._restart_count > 0 and tries <= _MOST_FAILED_STARTS
        if decision.reason is Reason.FAILED and end.lacks_room and may_wait:
            return _later(cause, tries)
        if decision.action is Action.RELAUNCH:
            cleared = BestEffort()("the step", lambda: self._scheduler.clear(end.attempt), False, asks_slurm=True)
            if not cleared:
                note = f"{cause}; nothing more can be started in this allocation, so Slurm is asked to requeue the job"
                return replace(decision, action=Action.REQUEUE, note=note, left_out=())
            if decision.left_out:
                self._scheduler.use(end.outcome.nodes.next, without=decision.left_out)
        if decision.reason is Reason.REQUEUED and self._job_id is not None:
            # After a preemption without grace time the job's own record says only that it was restarted.
            state = _nth(self._scheduler.past_ends(self._job_id), self._restart_count)
            if state == "PREEMPTED":
                return replace(decision, reason=Reason.PREEMPTED, note=f"preempted; {decision.note}")
            if state == "NODE_FAIL":
                return replace(decision, reason=Reason.NODE_FAILURE, note=f"a node was lost; {decision.note}")
        return decision

    def _act(self, decision: Decision, exit_code: int) -> int:
        if decision.action is Action.FINISH:
            return EXIT_DONE
        if decision.action in (Action.REQUEUE, Action.LEAVE):
            self._scheduler.wait_for_requeue(decision)
            return EXIT_REQUEUE
        return exit_code or EXIT_FAILURE

    def _hand_over(self, decision: Decision) -> int:
        """Has another job continue the run, since Slurm does not requeue this one, and records what came of it."""
        scheduler = self._scheduler
        if self._is_cancelled(scheduler.show_job()):
            # The job was cancelled after the decision, so the requeue did nothing, and no other job is wanted.
            self._record_outcome(CANCELLED.note, reason=CANCELLED.reason, action=CANCELLED.action)
            return EXIT_FAILURE
        new_id = BestEffort()("another job", lambda: scheduler.resubmit(decision), "", asks_slurm=True)
        if new_id:
            note = f"{decision.reason}; this job cannot be requeued; job {new_id} takes over when it has ended"
            self._record_outcome(note)
            return EXIT_REQUEUE
        refusals = "; ".join(scheduler.refusals) or "Slurm did not confirm the requeue"
        note = f"{decision.reason}; {refusals}; `resume` continues the run"
        attempt = self._record_outcome(note, outcome=NOT_REQUEUED)
        self._send("failed", note, attempt=attempt, once=f"attempt {attempt}")
        return EXIT_FAILURE

    def _record_outcome(self, note: str, **facts: Any) -> int:
        """Adds what became of the decision to the attempt of this start, if it has opened one; returns its number."""
        best_effort = BestEffort()
        ledger = best_effort("the ledger", lambda: read_ledger(self._run), list[Attempt]())
        newest = ledger[-1] if ledger else Attempt(0, Start())
        say(f"attempt {newest.number}: {note}")
        if ledger and self._is_of_this_start(newest):
            end = replace(newest.end or End(time_unix_s=time.time()), note=note, **facts)
            best_effort("the ledger", lambda: record_end(self._run, newest.number, end), None)
        return newest.number

    def _is_of_this_start(self, attempt: Attempt) -> bool:
        return attempt.start.job_start == self._scheduler.start.job_start

    def _is_cancelled(self, job: Mapping[str, str] | None) -> bool:
        """Returns whether somebody cancelled this job, which is ending, perhaps in the grace time of a preemption.

        In the grace time the job's own record looks the same either way, but accounting has the cancellation at once
        (22.05: "CANCELLED" while still COMPLETING; a requeued job has more Restarts by then). Accounting is asked only
        where it matters.
        """
        if job is None or self._job_id is None:
            return False
        if slurm_reason(job, self._restart_count) is Reason.CANCELLED:
            return True
        is_ending = job.get("JobState") in ("COMPLETING", "CANCELLED")
        if not is_ending or int(job.get("Restarts", "0")) > self._restart_count:
            return False
        return _nth(self._scheduler.past_ends(self._job_id), self._restart_count) == "CANCELLED"


def close_lost(run: RunDirectory, start: Start, *, past_ends: Callable[[str], Sequence[str]], last_step: int) -> None:
    """Writes the end line of every attempt that has none because its supervisor was killed or lost with its node.

    Ranks that are slower than Slurm's KillWait after a preemption or a requeue leave the supervisor no time, either.

    Args:
        run: the run; its lock is held, so no attempt of it is under way.
        start: the attempt that is about to begin; all present checkpoints were committed in earlier ones.
        past_ends: returns the states in which the earlier starts of a job ended, oldest first; empty if unknown.
        last_step: the furthest recorded step, for an attempt that has recorded none.
    """
    for lost in read_ledger(run):
        if lost.end is not None:
            continue
        attempt = lost.number
        job_id, index = lost.start.job_start
        start_unix_s = lost.start.time_unix_s
        state = _nth(past_ends(str(job_id)) if job_id else (), index)
        if not state and job_id:
            # Without accounting, or before it has the end; Slurm's times are whole seconds.
            batch_log = read_tail(run.logs / "batch.log", _BATCH_LOG_BYTES)
            state = state_in_batch_log(batch_log, since_unix_s=math.floor(start_unix_s))
        # A living supervisor closes its attempt whatever happens to the job, so this one was lost with its node.
        was_restarted = job_id is not None and job_id == start.job_id and start.restart_count > index
        reason = _LOST_REASONS.get(state, Reason.NODE_FAILURE if was_restarted else Reason.LOST)
        note = "its supervisor was killed or lost"
        if state:
            note += f"; Slurm calls it {state}{advice_on(state)}"
        end_unix_s = start_unix_s
        # The end is estimated from the times of files; if these cannot be read, the run goes on.
        with contextlib.suppress(OSError):
            end_unix_s = max([start_unix_s, *change_times(listed(run.attempt_logs(attempt))).values()])
        # How many steps of an earlier attempt it repeated is no longer known.
        seconds = read_account(run, attempt, start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_before=0)
        end = End(
            time_unix_s=end_unix_s,
            last_step=step_of_attempt(run, attempt, default=last_step),
            last_committed=start.first_committed,
            seconds=seconds,
            reason=reason,
            action=Action.LOST,
            note=note,
        )
        record_end(run, attempt, end)


def refused_code(run: RunDirectory, attempt: int, env: Mapping[str, str]) -> int | None:
    """Returns the exit code of an attempt whose snapshot of the code was changed, None where it may begin.

    A requeue runs the snapshot again, perhaps days later. The error is printed and left as the attempt's mark, so that
    the ledger has it.
    """
    try:
        own_snapshot(run)
        require_sealed(run)
    except RunError as err:
        say(str(err))
        leave_mark(run, attempt, FailureMark(rank=0, host=node_name(env), exit_code=2, message=err.message))
        return err.exit_code
    return None


def ignore_stop_signals() -> None:
    """Makes this process survive the signals that ask the ranks to stop, since it waits for the ranks to end."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
        # A handler, not SIG_IGN: an ignored signal would be inherited by the ranks.
        signal.signal(number, lambda *_: None)


@contextlib.contextmanager
def on_stop(act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` for each signal that asks for a stop while the body runs: Ctrl-C, `kill`, a closed terminal.

    Under `nohup` a closed terminal asks for nothing.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda _number, _frame: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _moved(run: RunDirectory) -> RunError | None:
    """Returns the error of a run directory that is not in its place any more; nothing can be decided without it."""
    try:
        check_held(run)
    except RunError as err:
        return err
    return None


def _later(problem: str, tries: int) -> Decision:
    delay_s = min(FIRST_DELAY_S << max(tries - 1, 0), _LONGEST_DELAY_S)
    note = f"{problem}; Slurm is asked to requeue the job, for {delay_s} s later"
    return Decision(Reason.FILE_SYSTEM, Action.REQUEUE, note, delay_s=delay_s)


def _nth(states: Sequence[str], index: int) -> str:
    """Returns how the start with this number ended, "" where that is not known."""
    return states[index] if index < len(states) else ""
