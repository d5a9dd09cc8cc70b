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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.config.program import program_of
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, RunError
from slurm_train.metrics import last_numbers
from slurm_train.rundir.attempts import (
    Round,
    check_held,
    hold_run,
    let_go,
    newest_round,
    open_attempt,
    overtaken,
    publish_result,
    read_round,
)
from slurm_train.rundir.cause import Cause
from slurm_train.rundir.files import change_times, is_there, listed, read_tail
from slurm_train.rundir.jobs import complete_stop, obey_stop, record_job, release_lock, take_lock
from slurm_train.rundir.ledger import Action, Attempt, End, Reason, Start, read_ledger, record_end
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.scores import num_recorded
from slurm_train.rundir.signs import read_group, read_signs
from slurm_train.rundir.timing import last_step, read_account, step_of_attempt
from slurm_train.slurm.records import state_in_batch_log
from slurm_train.supervise.actions import CANCELLED, Decision
from slurm_train.supervise.best_effort import BestEffort, say
from slurm_train.supervise.decision import (
    advice_on,
    decide,
    ends_without_progress,
    exit_code_of,
    failed_on,
    nodes_to_avoid,
    used_up,
)
from slurm_train.supervise.evidence import Traces, cause_of
from slurm_train.supervise.job import Job
from slurm_train.supervise.notify import Event, Notifier
from slurm_train.supervise.own_end import EndKind
from slurm_train.supervise.requeue import carry_out, is_cancelled, nth_end
from slurm_train.supervise.silence import apart_sentence
from slurm_train.supervise.step import Step

_WRITER_WAIT_S = 60.0
_BATCH_LOG_BYTES = 64 * 1024
_RETURNS = (Action.REQUEUE, Action.LEAVE)
"""After these the job comes back."""
_WITH_CAUSE = (Reason.FAILED, Reason.NODE_FAILURE, Reason.FILE_SYSTEM)
"""Ends that what ranks and nodes did has brought about; of the others Slurm or a person says why."""
_LOST_REASONS = {
    "NODE_FAIL": Reason.NODE_FAILURE,
    "BOOT_FAIL": Reason.NODE_FAILURE,
    "PREEMPTED": Reason.PREEMPTED,
    "TIMEOUT": Reason.TIME_LIMIT,
    "REQUEUED": Reason.REQUEUED,
    "CANCELLED": Reason.CANCELLED,
}


def progress_of(run: RunDirectory, config: RunConfig) -> Callable[[], int | None]:
    """Returns the function by which `Supervisor` measures progress.

    The progress of a training is its newest checkpoint, that of an evaluator that follows a run the number of scores
    that it has recorded.
    """
    if config.train.follow is not None:
        return partial(num_recorded, run)
    saves = program_of(config).saves

    def committed_step() -> int | None:
        step = newest_committed_step(run.checkpoints)
        return None if step < 0 and not saves else step

    return committed_step


class Supervisor:
    """One job's work on a run, from the opening of its attempt to the requeue.

    Args:
        run: the run.
        job: the job of this process.
        step: runs the ranks.
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
        job: Job,
        step: Step,
        settings: RequeueSection,
        *,
        committed_step: Callable[[], int | None] | None = None,
        is_own_code: bool = False,
        notify: Notifier | None = None,
    ) -> None:
        self._run = run
        self._notify = notify
        self._job = job
        self._step = step
        self._settings = settings
        self._committed_step = committed_step
        self._is_own_code = is_own_code

    def supervise(self) -> int:
        """Runs one attempt, and further ones in the same allocation if ranks are relaunched; returns the exit code.

        Raises:
            RunError: another job or process runs this directory, a newer attempt has taken over meanwhile, or the
                directory was moved or removed.
        """
        run = self._run
        with self._holding():
            start = self._start()
            close_lost(run, start, past_ends=self._job.past_ends, last_step=last_step(run))
            if is_there(run.result):
                say(f"{run.path} is finished already; see {run.result}")
                return EXIT_DONE
            refusal = self._refusal(start)
            if refusal:
                say(refusal)
                return EXIT_FAILURE
            while True:
                exit_code, decision = self._run_attempt()
                if decision.action is not Action.RELAUNCH:
                    break
        return carry_out(run, self._job, decision, exit_code, notify=self._notify)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Holds the run for this job."""
        run = self._run
        job = self._job
        job_id = job.job_id
        # A process that writes configuration or code holds the lock for a moment; a job waits for it.
        wait_s = _WRITER_WAIT_S if job_id is not None else 0.0
        hold_run(run)
        take_lock(run.lock, job.holder, is_alive=job.is_alive, wait_s=wait_s)
        try:
            # Only after the lock is taken: a job without the lock must not hide the job that has it.
            if job_id is not None:
                cluster = job.holder.cluster
                record_job(run, job_id, cluster=cluster, continues=job.continues, is_packed=job.is_shared)
            yield
        finally:
            best_effort = BestEffort()
            if job_id is not None:
                best_effort("the STOP file", lambda: complete_stop(run, job_id, newest_job=job.newest_job), None)
            # A lock that cannot be removed is taken over by this job's next start, or by any job after this one's end.
            best_effort("the lock", lambda: release_lock(run.lock, job.holder), None)
            let_go(run)

    def _refusal(self, start: Start) -> str:
        """Returns why no attempt may begin, "" where one may."""
        run = self._run
        job = self._job
        refusal = obey_stop(run, job.job_id, continues=job.continues, newest_job=job.newest_job)
        if refusal:
            return refusal
        if job.has_left():
            # Also where a site requeues jobs by their exit code (RequeueExit).
            return f"it has stopped in an earlier start of job {job.job_id}; `resume {run.run_id}` continues the run"
        refusal = self._budget_used_up(start)
        if not refusal:
            return ""
        self._send("failed", f"nothing is started: {refusal}", attempt=max(existing_attempts(run), default=0))
        return f"nothing is started: {refusal}"

    def _start(self) -> Start:
        return replace(self._step.start, first_committed=self._committed())

    def _committed(self) -> int | None:
        """Returns the step of the newest checkpoint; None if it is unknown or cannot be read."""
        if self._committed_step is None:
            return None
        return BestEffort()("the checkpoints", self._committed_step, None)

    def _budget_used_up(self, start: Start) -> str:
        """Returns why a job that Slurm has restarted by itself must not go on, "" where it may; writes it down."""
        ledger = read_ledger(self._run)
        newest = ledger[-1] if ledger else None
        if self._job.restart_count == 0 or start.first_committed is None or newest is None or newest.end is None:
            return ""
        end = newest.end
        max_returns = self._settings.max_returns_without_progress
        refusal = used_up(ends_without_progress(ledger), end.reason, max_returns=max_returns, newest=newest)
        if refusal:
            record_end(self._run, newest.number, replace(end, action=Action.STOP, note=f"{end.reason}; {refusal}"))
        return refusal

    def _run_attempt(self) -> tuple[int, Decision]:
        """Runs the ranks once; on return the ledger has both lines of the attempt, unless the second write failed."""
        run = self._run
        this_start = (self._job.job_id, self._job.restart_count)
        is_first_here = all(earlier.start.job_start != this_start for earlier in read_ledger(run))
        # Ranks that are started again in the same allocation have not waited in the queue.
        queue_s = self._job.queue_s() if is_first_here else 0.0
        start_unix_s = time.time()
        start = self._start()
        attempt = open_attempt(run, start)
        opening = Round(world_size=start.world_size, first_step=last_step(run), start_unix_s=start_unix_s)
        oom_kills_before = self._step.num_oom_kills()
        try:
            exit_code = self._step.run(attempt)
        except OSError as err:
            unable = End(
                time_unix_s=time.time(),
                reason=Reason.FILE_SYSTEM,
                action=Action.REQUEUE,
                note=f"the run could not be started: {err}",
            )
            BestEffort()("the ledger", lambda: record_end(run, attempt, unable), None)
            raise
        # From here to the requeue nothing may raise, and no read or write may block for ever.
        best_effort = BestEffort()
        moved = best_effort("the run directory", lambda: _moved(run), None)
        if moved is not None:
            raise moved
        had_oom_kill = self._step.num_oom_kills() > oom_kills_before
        traces = self._read_traces(attempt, opening, exit_code, best_effort, had_oom_kill=had_oom_kill)
        cause = cause_of(traces)
        decision = self._decide(traces, cause)
        if traces.end_of_own is EndKind.FINISHED:
            apart = self._publish(traces.number, best_effort)
            decision = replace(decision, note=f"{decision.note}; {apart}") if apart else decision
        not_saved = best_effort("the event of the stop", lambda: traces.not_saved, "")
        grows_to = traces.growth if decision.reason is Reason.GROWTH else None
        end = replace(
            traces.end,
            reason=decision.reason,
            action=decision.action,
            note=decision.note + not_saved,
            cause=cause if decision.reason in _WITH_CAUSE else None,
            failed_on=failed_on(traces, cause) if decision.reason is Reason.FAILED else (),
            left_out=decision.left_out,
            grow_to=None if grows_to is None else grows_to.nodes,
            pays_after_s=None if grows_to is None else grows_to.pays_after_s,
            seconds=traces.end.seconds if queue_s is None else {**traces.end.seconds, "queue_s": queue_s},
        )
        best_effort("the ledger", lambda: record_end(run, traces.number, end), None)
        say(f"attempt {traces.number}: {decision.note}")
        self._notify_of_end(traces, decision, best_effort)
        return exit_code or exit_code_of(traces, cause), decision

    def _notify_of_end(self, traces: Traces, decision: Decision, best_effort: BestEffort) -> None:
        """Sends the messages that an end calls for."""
        if self._notify is None:
            return
        note = decision.note
        attempt = traces.number
        if traces.hang:
            self._send("hung", note, attempt=attempt, once=f"attempt {attempt}")
        if decision.action is Action.FINISH:
            self._send("finished", note, attempt=attempt)
        elif decision.action is Action.STOP and decision.reason not in (Reason.CANCELLED, Reason.STOPPED):
            self._send("failed", note, attempt=attempt, once=f"attempt {attempt}")
        elif decision.action in _RETURNS:
            ledger = best_effort("the ledger", lambda: read_ledger(self._run), list[Attempt]())
            ends = [one.end for one in ledger if one.end is not None and one.end.reason is not Reason.GROWTH]
            returns = sum(end.action in (*_RETURNS, Action.LOST) for end in ends)
            if returns > self._settings.notify_after:
                self._send("requeued", f"for the {returns}. time: {note}", attempt=attempt)

    def _send(self, event: Event, note: str, *, attempt: int, once: str = "") -> None:
        if self._notify is not None:
            self._notify(event, note=note, job_id=self._job.job_id, attempt=attempt, once=once)

    def _read_traces(
        self, first_attempt: int, opening: Round, exit_code: int, best_effort: BestEffort, *, had_oom_kill: bool
    ) -> Traces:
        """Returns what can be read of an attempt whose ranks have ended.

        Raises:
            RunError: a newer attempt has taken over; after a node loss this process may still run beside the newer one.
        """
        run = self._run
        # torchrun restarts failed ranks by itself; then the newest of its rounds is the attempt that has ended.
        attempt = best_effort("the attempts", lambda: newest_round(run, first_attempt), first_attempt)
        if attempt != first_attempt:
            opening = best_effort("the attempt", lambda: read_round(run, attempt), None) or opening
        newest = best_effort("the attempts", lambda: max(existing_attempts(run)), attempt)
        if newest > attempt:
            raise overtaken(run, attempt, newest)
        return Traces.read(
            run,
            attempt,
            opening,
            exit_code,
            job=self._job,
            step=self._step,
            best_effort=best_effort,
            last_committed=self._committed(),
            is_own_code=self._is_own_code,
            had_oom_kill=had_oom_kill,
        )

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

    def _decide(self, traces: Traces, cause: Cause | None) -> Decision:
        """Returns what follows; if ranks are to be relaunched, the nodes are free for them when it returns."""
        step = self._step
        to_avoid = nodes_to_avoid(traces, cause)
        others = tuple(step.nodes_without(to_avoid))
        can_avoid = bool(to_avoid) and (bool(others) or step.can_avoid(to_avoid))
        avoid = to_avoid if can_avoid else ()
        decision = decide(traces, cause, settings=self._settings, avoid=avoid, others=others)
        # A job that was being preempted does not show that `scancel` cancelled it.
        if decision.action is Action.REQUEUE and is_cancelled(self._job, traces.job):
            return CANCELLED
        if decision.action is Action.RELAUNCH:
            cleared = BestEffort()("the step", lambda: step.clear(traces.number), False, asks_slurm=True)
            if not cleared:
                why = "nothing more can be started in this allocation, so Slurm is asked to requeue the job"
                note = f"{cause}; {why}" if cause is not None else why
                return replace(decision, action=Action.REQUEUE, note=note, left_out=())
            if decision.left_out:
                step.use(others, without=decision.left_out)
        if decision.reason is Reason.REQUEUED and self._job.job_id is not None:
            # After a preemption without grace time the job's own record says only that it was restarted.
            state = nth_end(self._job.past_ends(self._job.job_id), self._job.restart_count)
            if state == "PREEMPTED":
                return replace(decision, reason=Reason.PREEMPTED, note=f"preempted; {decision.note}")
            if state == "NODE_FAIL":
                return replace(decision, reason=Reason.NODE_FAILURE, note=f"a node was lost; {decision.note}")
        return decision


def close_lost(run: RunDirectory, start: Start, *, past_ends: Callable[[str], Sequence[str]], last_step: int) -> None:
    """Writes the end line of every attempt that has none because its supervisor was killed or lost with its node.

    Ranks that are slower than Slurm's KillWait after a preemption or a requeue leave the supervisor no time, either.

    Args:
        run: the run; its lock is held, so no attempt of it is under way.
        start: the attempt that is about to begin; all present checkpoints were committed in earlier ones.
        past_ends: returns the states in which the earlier starts of a job ended, oldest first; empty if unknown.
        last_step: the furthest recorded step, for an attempt that has recorded none.
    """
    for attempt in read_ledger(run):
        if attempt.end is not None:
            continue
        job_id, index = attempt.start.job_start
        start_unix_s = attempt.start.time_unix_s
        state = nth_end(past_ends(job_id) if job_id else (), index)
        if not state and job_id:
            # Without accounting, or before it has the end; Slurm's times are whole seconds.
            batch_log = read_tail(run.logs / "batch.log", _BATCH_LOG_BYTES)
            state = state_in_batch_log(batch_log, since_unix_s=math.floor(start_unix_s))
        # A living supervisor closes its attempt whatever happens to the job, so this one was lost with its node.
        was_restarted = job_id is not None and job_id == start.job_id and start.restart_count > index
        note = "its supervisor was killed or lost"
        if state:
            note += f"; Slurm calls it {state}{advice_on(state)}"
        end_unix_s = start_unix_s
        # The end is estimated from the times of files; if these cannot be read, the run goes on.
        with contextlib.suppress(OSError):
            end_unix_s = max([start_unix_s, *change_times(listed(run.attempt_logs(attempt.number))).values()])
        wall = {"start_unix_s": start_unix_s, "end_unix_s": end_unix_s}
        end = End(
            time_unix_s=end_unix_s,
            reason=_LOST_REASONS.get(state, Reason.NODE_FAILURE if was_restarted else Reason.LOST),
            action=Action.LOST,
            note=note,
            last_step=step_of_attempt(run, attempt.number, default=last_step),
            last_committed=start.first_committed,
            # How many steps of an earlier attempt it repeated is no longer known.
            seconds=read_account(run, attempt.number, **wall, step_before=0),
        )
        record_end(run, attempt.number, end)


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
