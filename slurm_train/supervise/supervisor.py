"""Supervises one attempt: opens it, runs the ranks, reads what they left, writes the ledger, acts on the decision.

Runs where the batch script runs: on the head node, outside any container, without torch. Everything is written before
`scontrol requeue` is called, because Slurm kills this process by it. When the ranks have ended, nothing is sure to be
readable: each fact has a default, and the decision is made from what can be read. Attempts that nobody closed, because
their supervisor was killed or lost with its node, are closed by the next one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.rundir.attempts import (
    AttemptStart,
    Round,
    close_attempt,
    newest_round,
    open_attempt,
    overtaken,
    publish_result,
    read_ledger,
    read_round,
)
from slurm_train.rundir.events import (
    FailureMark,
    bad_nodes_of,
    codes_of,
    fatal_line,
    first_mark,
    named_node,
    read_events,
    read_preflight,
)
from slurm_train.rundir.files import change_times, listed
from slurm_train.rundir.jobs import Holder, complete_stop, obey_stop, record_job, release_lock, take_lock
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.timing import last_step, read_account
from slurm_train.supervise.decision import (
    CANCELLED,
    Decision,
    Outcome,
    course_of,
    decide,
    fruitless_ends,
    is_fruitful,
    last_bad_node,
    node_of,
    slurm_reason,
    starts_in_vain,
    used_up,
)
from slurm_train.supervise.monitor import BestEffort, say
from slurm_train.supervise.scheduler import wait_for_the_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the supervisor asks of the world around it; local runs have answers of their own."""

    start: AttemptStart
    holder: Holder
    is_alive: Callable[[Holder], bool]
    """Whether another holder of the run's lock still lives."""
    show_job: Callable[[], dict[str, str] | None]
    """This job's record, None where there is none or Slurm does not answer."""
    requeue: Callable[[Decision], bool]
    """Requeues this job; returns whether Slurm confirmed it."""
    resubmit: Callable[[Decision], str] = lambda _: ""
    """Submits another job that takes over when this one has ended; returns its id, "" where that failed."""
    explain: Callable[[int], str] = lambda _: ""
    """What is known from outside about how an attempt's ranks ended; "" if nothing."""
    clear: Callable[[int], bool] = lambda _: True
    """Ends what is left of an attempt's ranks; returns whether its nodes are free again."""
    past_ends: Callable[[str], Sequence[str]] = lambda _: ()
    """How the earlier starts of a job ended in Slurm's words, oldest first."""
    can_avoid: Callable[[str], bool] = lambda _: False
    """Whether there are nodes enough for this job without one of them, or several with commas."""
    queue_s: float | None = None
    """Seconds that the job waited, from when it could have started; None where nobody knows."""
    can_relaunch: bool = False
    """Whether failed ranks are started again here, without a person."""
    continues: str | None = None
    """The job that this one takes over from."""
    newest_job: Callable[[], int | None] = lambda: None
    """The highest number of this user's jobs that Slurm knows, None where it does not answer."""
    committed_step: Callable[[], int] | None = None
    """Gives the step of the newest checkpoint, -1 if there is none; None for a user's own code, whose progress nobody
    knows: what counts there is the newest logged step, and how often the job comes back has no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the ranks of an attempt ended, as far as it can be read."""

    attempt: int
    exit_code: int
    job: dict[str, str] | None
    is_own_code: bool
    is_done: bool
    """Whether the run is finished."""
    stop_asked: bool
    ledger: list[dict[str, Any]]
    """Earlier attempts."""
    facts: dict[str, Any]
    """For the end line: exit code, steps, commit."""
    seconds: dict[str, float]
    """Where the time went."""
    is_fruitful: bool
    course: str
    mark: FailureMark | None
    cause: str
    failed_on: str
    """The node that the attempt failed on, "" where that is not known."""
    found: str
    """What the preflight has found, in short."""
    found_bad: str
    """The nodes that it has found bad, with commas."""
    has_begun: bool
    """Whether the preflight has let the ranks start."""
    asked_by: str
    """Who asked the ranks to stop, as they say; "" where nobody did."""
    left_out: str
    """Why no save was made at the stop, for the note; "" where one was."""


def look_back(
    run: RunDirectory, site: Site, first: int, begun: Round, exit_code: int, known: BestEffort, *, is_own_code: bool
) -> End:
    """Returns what can be read of an attempt whose ranks have ended.

    Raises:
        RunError: a newer attempt has taken over; after a node loss this process may live on beside its successor.
    """
    job = site.show_job()
    # torchrun starts failed ranks again by itself; then the newest of its rounds is the attempt that has ended.
    attempt = known("the attempts", lambda: newest_round(run, first), first)
    if attempt != first:
        begun = known("the attempt", lambda: read_round(run, attempt), None) or begun
    newest = known("the attempts", lambda: max(existing_attempts(run)), attempt)
    if newest > attempt:
        raise overtaken(run, attempt, newest)
    is_done = known("the result", run.result.exists, False)
    if is_own_code and exit_code == EXIT_DONE and _is_undisturbed(job):
        is_done, result = True, {"exit_code": 0, "attempt": attempt, "time_unix_s": time.time()}
        known("the result", lambda: publish_result(run, attempt, result), None)
    return End(
        attempt=attempt,
        exit_code=exit_code,
        job=job,
        is_own_code=is_own_code,
        is_done=is_done,
        stop_asked=known("the STOP file", run.stop_file.exists, False),
        **_progress(run, site, attempt, begun, exit_code, known, is_own_code=is_own_code),
        **_cause(run, site, attempt, exit_code, known),
    )


def _progress(
    run: RunDirectory, site: Site, attempt: int, begun: Round, exit_code: int, known: BestEffort, *, is_own_code: bool
) -> dict[str, Any]:
    """Returns how far the attempt came, and where its time went."""
    wall = {"start_unix_s": begun.start_unix_s, "end_unix_s": time.time()}
    read = partial(read_account, run, attempt, **wall, step_before=begun.first_step)
    seconds = known("the account", read, dict[str, float]())
    if not seconds and not is_own_code:
        # Ranks that never met were starting all the time.
        seconds["start_s"] = round(wall["end_unix_s"] - begun.start_unix_s, 3)
    facts = {"exit_code": exit_code, "first_step": begun.first_step}
    facts["last_step"] = known("the metrics", lambda: last_step(run), begun.first_step)
    if (committed := committed_step(site)) is not None:
        facts["last_committed"] = committed
    ledger = known("the ledger", lambda: read_ledger(run), list[dict[str, Any]]())
    entry = next((line for line in ledger if line["attempt"] == attempt), dict[str, Any]()) | facts
    return {
        "ledger": [line for line in ledger if line["attempt"] < attempt],
        "facts": facts,
        "seconds": seconds,
        "is_fruitful": is_fruitful(entry),
        "course": course_of({**entry, **seconds, "end_time_unix_s": wall["end_unix_s"]}),
    }


def _cause(run: RunDirectory, site: Site, attempt: int, exit_code: int, known: BestEffort) -> dict[str, Any]:
    """Returns why the ranks ended, in their own words and in those of srun and the preflight."""
    failed = exit_code not in (EXIT_DONE, EXIT_REQUEUE)
    record = known("the preflight's record", lambda: read_preflight(run, attempt), dict[str, Any]())
    found_bad = known("the preflight's record", lambda: ",".join(bad_nodes_of(record)), "")
    named = known("the preflight's record", lambda: named_node(record), "")
    mark = known("the marks of the ranks", lambda: first_mark(run, attempt), None)
    stops = known("the events", lambda: read_events(run, "stop"), list[dict[str, Any]]())
    stop = next((line for line in reversed(stops) if line.get("attempt") == attempt), dict[str, Any]())
    # srun ends with 0 after a node failure, so its words count whatever its code.
    cause = known("the words of srun", lambda: site.explain(attempt), "") or (str(mark or "") if failed else "")
    return {
        "mark": mark,
        "cause": cause,
        "failed_on": found_bad or named or node_of(cause) or (mark.host if mark is not None else ""),
        "found": known("the preflight's record", lambda: codes_of(record), ""),
        "found_bad": found_bad,
        "has_begun": not (failed and known("the preflight's record", lambda: fatal_line(record), "")),
        "asked_by": str(stop.get("asked_by", "")),
        "left_out": known("the event of the stop", lambda: _left_out(stop), ""),
    }


def committed_step(site: Site) -> int | None:
    """Returns the step of the newest checkpoint, -1 if there is none; None where nobody knows or it cannot be read."""
    return None if site.committed_step is None else BestEffort(say)("the checkpoints", site.committed_step, None)


def _is_undisturbed(job: dict[str, str] | None) -> bool:
    # srun ends with 0 after a node failure, too; the job's state tells the two apart.
    return job is None or job.get("JobState") == "RUNNING"


def _left_out(stop: Mapping[str, Any]) -> str:
    if not stop or stop["saved"]:
        return ""
    return f"; no save at the stop: {stop['left_s']:.0f} s were left and a save takes {stop['save_s']:.0f} s"


_LOST_REASONS = {
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time_limit",
    "REQUEUED": "requeued",
    "CANCELLED": "cancelled",
}


def close_lost(
    run: RunDirectory, now: AttemptStart, *, past_ends: Callable[[str], Sequence[str]], last_step: int
) -> None:
    """Writes the end line of every attempt that has none.

    Args:
        run: the run; its lock is held, so no attempt of it is under way.
        now: the attempt that is about to begin; what is committed now was committed in an earlier one.
        past_ends: how the earlier starts of a job ended in Slurm's words, oldest first; empty where nobody knows.
        last_step: the newest step on record.
    """
    for entry in read_ledger(run):
        if "end_time_unix_s" in entry:
            continue
        job_id = entry.get("job_id")
        reason, note = lost_because(entry, now, past_ends(str(job_id)) if job_id else ())
        facts: dict[str, Any] = {"reason": reason, "action": "lost", "note": note, "last_step": last_step}
        if now.committed_step is not None:
            facts["last_committed"] = now.committed_step
        # What it did again of an earlier attempt's steps is not known any more.
        start_unix_s, end_unix_s = float(entry.get("time_unix_s", 0.0)), _last_sign_of_life(run, entry)
        seconds = read_account(
            run, int(entry["attempt"]), start_unix_s=start_unix_s, end_unix_s=end_unix_s, step_before=0
        )
        close_attempt(run, int(entry["attempt"]), {**facts, **seconds, "time_unix_s": end_unix_s})


def lost_because(entry: Mapping[str, Any], now: AttemptStart, ends: Sequence[str]) -> tuple[str, str]:
    """Returns reason and note for an attempt that its supervisor could not close.

    Args:
        entry: its line of the ledger.
        now: the attempt that is about to begin.
        ends: how the starts of its job ended, oldest first.
    """
    index = int(entry.get("restart_count") or 0)
    word = ends[index] if index < len(ends) else ""
    if word in _LOST_REASONS:
        return _LOST_REASONS[word], f"ended without a word; Slurm calls it {word}"
    same_job = entry.get("job_id") is not None and entry.get("job_id") == now.job_id
    if same_job and now.restart_count > index:
        # A supervisor that is alive closes its attempt whatever happens to the job.
        return "node_failure", "ended without a word and was restarted by Slurm: its first node was lost"
    said = f"; Slurm calls it {word}" if word else ""
    return "lost", f"the batch script was killed{said}"


def why_restarted(start: AttemptStart, ends: Sequence[str]) -> str:
    """Returns "preempted" or "node_failure" for a start that Slurm ended itself, "" where accounting does not say yet.

    After a preemption without grace the job's own record says no more than that it was restarted.
    """
    word = ends[start.restart_count] if start.restart_count < len(ends) else ""
    return _LOST_REASONS[word] if word in ("PREEMPTED", "NODE_FAIL") else ""


def was_cancelled(start: AttemptStart, job: Mapping[str, str], ends: Callable[[], Sequence[str]]) -> bool:
    """Returns whether somebody cancelled a job that is ending, be it in the grace time of a preemption.

    There the job's own record looks alike; accounting says it at once (22.05: "CANCELLED" while still COMPLETING, and
    a job that is requeued has more Restarts by then).

    Args:
        start: the job's start that is ending.
        job: `scontrol show job`.
        ends: how the starts of the job ended, oldest first; asked only where it matters.
    """
    if slurm_reason(job, start.restart_count) == "cancelled":
        return True
    is_ending = job.get("JobState") in ("COMPLETING", "CANCELLED")
    if not is_ending or int(job.get("Restarts", "0")) > start.restart_count:
        return False
    words = ends()
    return start.restart_count < len(words) and words[start.restart_count] == "CANCELLED"


def _last_sign_of_life(run: RunDirectory, entry: Mapping[str, Any]) -> float:
    times = [float(entry.get("time_unix_s", 0.0))]
    # When a file was last touched is not worth a run.
    with contextlib.suppress(OSError):
        times += change_times(listed(run.attempt_logs(int(entry["attempt"])))).values()
    return max(times)


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
