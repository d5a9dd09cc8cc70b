"""Supervises one attempt: opens it, runs the ranks, reads what they left, writes the ledger, acts on the decision.

Runs where the batch script runs: on the head node, outside any container, without torch. Everything is written before
`scontrol requeue` is called, because Slurm kills this process by it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.requeue.bad_nodes import last_bad_node
from slurm_train.requeue.best_effort import BestEffort, say
from slurm_train.requeue.budget import course_of, fruitless_ends, starts_in_vain, used_up
from slurm_train.requeue.decision import CANCELLED, Decision, Outcome, decide
from slurm_train.requeue.end import End, Site, committed_step, look_back
from slurm_train.requeue.lost import close_lost, was_cancelled, why_restarted
from slurm_train.requeue.patience import wait_for_the_end
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt, read_ledger
from slurm_train.rundir.jobs import complete_stop, obey_stop, record_job
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.lock import release_lock, take_lock
from slurm_train.rundir.progress import last_step
from slurm_train.rundir.rounds import Round

_WRITER_WAIT_S = 60.0
_MOST_STARTS_IN_VAIN = 10
_DISK_FULL = "DISK_FULL"
"""The preflight's code: whoever submits hears of it at once, but a run that comes back waits for room."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 60, 3600
# Nothing that passes by itself.
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)

Launch = Callable[[int], int]
"""Runs the ranks of the attempt with this number and returns their exit code."""


def supervise(
    run: RunDirectory, settings: RequeueSection, site: Site, launch: Launch, *, is_own_code: bool = False
) -> int:
    """Runs one attempt from its opening to its end and returns the exit code of the whole.

    Args:
        run: the run.
        settings: when to come back.
        site: what the supervisor asks of the world.
        launch: runs the ranks.
        is_own_code: the ranks run a user's function or script, which leaves no `result.json` of ours: ending with 0
            on a job that Slurm still calls running is its mark of being done.

    Raises:
        RunError: somebody else runs this directory, or a newer attempt has taken over meanwhile.
    """
    job_id = site.start.job_id
    # Whoever writes configuration or code holds the lock for a moment; a job waits for that.
    take_lock(run, site.holder, is_alive=site.is_alive, wait_s=_WRITER_WAIT_S if job_id is not None else 0.0)
    try:
        site = replace(site, start=replace(site.start, committed_step=committed_step(site)))
        # Not before: a job that does not get the run must not hide the one that has it.
        if job_id is not None:
            record_job(run, job_id, continues=site.continues)
        close_lost(run, site.start, past_ends=site.past_ends, last_step=last_step(run))
        if run.result.exists():
            say(f"{run.path} is finished already; see {run.result}")
            return EXIT_DONE
        if refusal := obey_stop(run, job_id, continues=site.continues, newest_job=site.newest_job):
            say(refusal)
            return EXIT_FAILURE
        if why := _returned_in_vain(run, settings, site):
            say(f"nothing is started: {why}")
            return EXIT_FAILURE
        while True:
            exit_code, decision = _run_attempt(run, settings, site, launch, is_own_code=is_own_code)
            if decision.action != "relaunch":
                break
    finally:
        known = BestEffort(say)
        if job_id is not None:
            known("the STOP file", lambda: complete_stop(run, job_id, newest_job=site.newest_job), None)
        # One that stays is overtaken: by this job's next start, or by any other once this job has ended.
        known("the lock", lambda: release_lock(run, site.holder), None)
    if decision.action == "requeue" and not site.requeue(decision):
        return _hand_over(run, decision, site)
    return _act(decision, site, exit_code)


def come_back_later(run: RunDirectory, site: Site, error: OSError) -> int:
    """Requeues a job that could not start its ranks, or not do without a file; returns the exit code of the whole.

    A full disk or a stale file handle passes, so the job comes back, later each time, ten times in a row.

    Raises:
        OSError: the error itself, where it does not pass by itself.
    """
    if isinstance(error, _LASTING) or site.start.job_id is None:
        raise error
    known = BestEffort(say)
    start, ledger = site.start, known("the ledger", lambda: read_ledger(run), None)
    # Without a ledger the number is not known: the job tries again at long intervals.
    tries = _MOST_STARTS_IN_VAIN // 2
    if ledger is not None:
        tries = starts_in_vain(ledger, job_id=start.job_id, restart_count=start.restart_count)
    what = f"the run could not be started: {error}"
    if tries > _MOST_STARTS_IN_VAIN:
        say(f"{what}; that was start {tries} in a row, so the job ends; `resume` continues the run")
        return EXIT_FAILURE
    delay_s = _delay_s(tries)
    decision = Decision(
        "file_system", "requeue", f"{what}; the job is requeued, for {delay_s} s later", delay_s=delay_s
    )
    say(decision.note)
    if site.requeue(decision):
        return _act(decision, site, EXIT_FAILURE)
    return _hand_over(run, decision, site)


def _returned_in_vain(run: RunDirectory, settings: RequeueSection, site: Site) -> str:
    """Returns why a job that Slurm has started again by itself is not to go on, "" where it may; writes it down."""
    ledger = read_ledger(run)
    if site.start.restart_count == 0 or site.start.committed_step is None or not ledger:
        return ""
    newest = ledger[-1]
    course, most = course_of(newest), settings.max_fruitless_returns
    reason = str(newest.get("reason"))
    why = used_up(fruitless_ends(ledger), reason=reason, max_returns=most, course=course)
    if why:
        facts = {"action": "stop", "note": f"{reason}; {why}", "time_unix_s": newest["end_time_unix_s"]}
        close_attempt(run, int(newest["attempt"]), facts)
    return why


def _run_attempt(
    run: RunDirectory, settings: RequeueSection, site: Site, launch: Launch, *, is_own_code: bool
) -> tuple[int, Decision]:
    """Runs the ranks once; the ledger has both lines when it returns, the second as far as it could be written."""
    start_unix_s, is_first_here = time.time(), not _has_attempt_of(run, site.start)
    site = replace(site, start=replace(site.start, committed_step=committed_step(site)))
    first = open_attempt(run, site.start)
    begun = Round(world_size=site.start.world_size, first_step=last_step(run), start_unix_s=start_unix_s)
    try:
        exit_code = launch(first)
    except OSError as err:
        facts = {"reason": "file_system", "action": "requeue", "note": f"the run could not be started: {err}"}
        BestEffort(say)("the ledger", lambda: close_attempt(run, first, facts), None)
        raise
    # From here to the requeue nothing may raise, and no file may be waited for for ever.
    known = BestEffort(say)
    end = look_back(run, site, first, begun, exit_code, known, is_own_code=is_own_code)
    decision = _decide(settings, site, end)
    # Ranks that are started again in the same allocation have waited for nothing.
    queued = {} if site.queue_s is None else {"queue_s": site.queue_s if is_first_here else 0.0}
    closing = {**end.facts, **_in_words(decision, end), **end.seconds, **queued}
    known("the ledger", lambda: close_attempt(run, end.attempt, closing), None)
    say(f"attempt {end.attempt}: {decision.note}")
    return exit_code, decision


def _in_words(decision: Decision, end: End) -> dict[str, str]:
    words = {"reason": decision.reason, "action": decision.action, "note": decision.note + end.left_out}
    failed_on = {"failed_on": end.failed_on} if decision.reason == "failed" else {}
    others = {"asked_by": end.asked_by, "found": end.found}
    return words | failed_on | {name: text for name, text in others.items() if text}


def _decide(settings: RequeueSection, site: Site, end: End) -> Decision:
    """Returns what follows; ranks that are to be started again have room for it when it returns."""
    failed = end.exit_code not in (EXIT_DONE, EXIT_REQUEUE)
    before = fruitless_ends(end.ledger)
    outcome = Outcome(
        # srun gives one code for all ranks; the first one to fail knows better.
        exit_code=end.mark.exit_code if failed and end.mark is not None else end.exit_code,
        is_finished=end.is_done,
        stop_asked=end.stop_asked,
        requeue_enabled=settings.enabled,
        has_slurm=site.start.job_id is not None,
        job=end.job,
        restart_count=site.start.restart_count,
        # Nobody's own code has run where the nodes were found unfit before.
        can_relaunch=settings.enabled and site.can_relaunch and not (end.is_own_code and end.has_begun),
        fruitless_failures=0 if end.is_fruitful else before["failed"] + 1,
        max_fruitless_failures=settings.max_fruitless_failures,
        fruitless_ends=None if end.is_fruitful or site.committed_step is None else before,
        max_fruitless_returns=settings.max_fruitless_returns,
        course=end.course,
        bad_node="" if end.is_fruitful else _bad_node(site, end),
        is_bad_for_certain=bool(end.found_bad),
        cause=end.cause,
    )
    decision = decide(outcome)
    # `cancel` leaves a STOP file as well, and a job that was being preempted does not show that it was cancelled.
    if (decision.action == "requeue" or decision.reason == "stopped") and _is_cancelled(site, end.job):
        return CANCELLED
    if later := _put_off_for_room(settings, site, end, decision):
        return later
    known = BestEffort(say)
    if decision.action == "relaunch" and not known("the step", lambda: site.clear(end.attempt), False, asks_slurm=True):
        note = f"{end.cause}; what is left of the ranks does not end, so the job is requeued"
        return replace(decision, action="requeue", note=note)
    if decision.reason == "requeued" and (job_id := site.start.job_id) is not None:
        why = why_restarted(site.start, site.past_ends(job_id))
        if why == "preempted":
            return replace(decision, reason="preempted", note=f"preempted; {decision.note}")
        if why == "node_failure":
            return replace(decision, reason="node_failure", note=f"a node was lost; {decision.note}")
    return decision


def _put_off_for_room(settings: RequeueSection, site: Site, end: End, decision: Decision) -> Decision | None:
    """Returns another decision where a job that Slurm has started again found too little room on the disk."""
    is_full = decision.reason == "failed" and not end.has_begun and _DISK_FULL in end.found
    tries = fruitless_ends(end.ledger)["file_system"] + 1
    if not is_full or not settings.enabled or site.start.restart_count == 0 or tries > _MOST_STARTS_IN_VAIN:
        return None
    delay_s = _delay_s(tries)
    note = f"{end.cause}; the job is requeued, for {delay_s} s later"
    return Decision("file_system", "requeue", note, delay_s=delay_s)


def _delay_s(tries: int) -> int:
    return min(_FIRST_DELAY_S << max(tries - 1, 0), _LONGEST_DELAY_S)


def _bad_node(site: Site, end: End) -> str:
    if found := end.found_bad:
        return found if site.can_avoid(found) else ""
    node = end.failed_on
    return node if node and node == last_bad_node(end.ledger) and site.can_avoid(node) else ""


def _has_attempt_of(run: RunDirectory, start: AttemptStart) -> bool:
    same = (start.job_id, start.restart_count)
    return any((entry.get("job_id"), entry.get("restart_count")) == same for entry in read_ledger(run))


def ignore_stop_signals() -> None:
    """Lets the signals that ask the ranks to stop pass by the supervisor, which waits for them to end."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
        # A handler, not SIG_IGN: an ignored signal would be inherited by the ranks.
        signal.signal(number, lambda *_: None)


def _act(decision: Decision, site: Site, exit_code: int) -> int:
    if decision.action == "finish":
        return EXIT_DONE
    if decision.action in ("requeue", "leave"):
        wait_for_the_end(lambda: site.requeue(decision))
        return EXIT_REQUEUE
    return exit_code or EXIT_FAILURE


def _hand_over(run: RunDirectory, decision: Decision, site: Site) -> int:
    if _is_cancelled(site, site.show_job()):
        # scancel came after the decision, so the requeue did nothing, and no other job is wanted.
        facts = {name: asdict(CANCELLED)[name] for name in ("reason", "action", "note")}
        known = BestEffort(say)
        attempt = known("the attempts", lambda: max(existing_attempts(run), default=None), None)
        if attempt is not None:
            known("the ledger", lambda: close_attempt(run, attempt, facts), None)
        say(f"attempt {attempt}: {CANCELLED.note}")
        return EXIT_FAILURE
    new_id = BestEffort(say)("another job", lambda: site.resubmit(decision), "", asks_slurm=True)
    if not new_id:
        say("Slurm did not confirm the requeue; `resume` continues the run")
        return EXIT_FAILURE
    say(f"this job cannot be requeued; job {new_id} takes over when it has ended")
    return EXIT_REQUEUE


def _is_cancelled(site: Site, job: dict[str, str] | None) -> bool:
    job_id = site.start.job_id
    return job is not None and job_id is not None and was_cancelled(site.start, job, lambda: site.past_ends(job_id))
