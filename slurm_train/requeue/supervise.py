"""Supervises one attempt: opens it, runs the ranks, reads what they left, writes the ledger, acts on the decision.

Runs where the batch script runs: on the head node, outside any container, without torch. Everything is written before
`scontrol requeue` is called, because Slurm kills this process by it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.requeue.bad_nodes import last_bad_node, node_of
from slurm_train.requeue.decision import CANCELLED, Decision, Outcome, decide
from slurm_train.requeue.lost import close_lost, was_cancelled, why_restarted
from slurm_train.requeue.patience import wait_for_the_end
from slurm_train.rundir.attempts import AttemptStart, check_fence, close_attempt, open_attempt, read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.jobs import complete_stop, obey_stop, record_job
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.lock import Holder, release_lock, take_lock
from slurm_train.rundir.marks import first_mark
from slurm_train.rundir.preflight import bad_nodes, codes_of, fatal_line, named_node, read_record
from slurm_train.rundir.progress import last_step
from slurm_train.rundir.rounds import newest_round, read_round
from slurm_train.rundir.timing import read_account


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


_WRITER_WAIT_S = 60.0
_NO_FAULT = ("preempted", "time_limit", "requeued", "node_failure", "lost")
"""Ends that are not the run's own fault and have no budget."""

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
        # Not before: a job that does not get the run must not stand in front of the one that has it.
        if job_id is not None:
            record_job(run, job_id, continues=site.continues)
        close_lost(run, site.start, past_ends=site.past_ends, last_step=last_step(run))
        if run.result.exists():
            say(f"{run.path} is finished already; see {run.result}")
            return EXIT_DONE
        if refusal := obey_stop(run, job_id, continues=site.continues, newest_job=site.newest_job):
            say(refusal)
            return EXIT_FAILURE
        while True:
            exit_code, decision = _run_attempt(run, settings, site, launch, is_own_code=is_own_code)
            if decision.action != "relaunch":
                break
    finally:
        if job_id is not None:
            complete_stop(run, job_id, newest_job=site.newest_job)
        release_lock(run, site.holder)
    if decision.action == "requeue" and not site.requeue(decision):
        return _hand_over(run, decision, site)
    return _act(decision, site, exit_code)


def _run_attempt(
    run: RunDirectory, settings: RequeueSection, site: Site, launch: Launch, *, is_own_code: bool
) -> tuple[int, Decision]:
    """Runs the ranks once; the ledger has both lines when it returns."""
    start_unix_s, is_first_here = time.time(), not _has_attempt_of(run, site.start)
    first = open_attempt(run, site.start)
    step_before = last_step(run)
    exit_code = launch(first)
    job, step_after = site.show_job(), last_step(run)
    # torchrun starts failed ranks again by itself; then the newest of its rounds is the attempt that has ended.
    attempt = newest_round(run, first)
    if attempt != first and (begun := read_round(run, attempt)) is not None:
        start_unix_s, step_before = begun.start_unix_s, begun.first_step
    # After a node loss this process may live on beside its successor; then nothing more is its business.
    check_fence(run, attempt)
    if is_own_code and exit_code == EXIT_DONE and _is_undisturbed(job):
        result = {"exit_code": 0, "attempt": attempt, "time_unix_s": time.time()}
        write_atomic(run.result, json.dumps(result) + "\n")
    decision = _decide(run, settings, site, attempt, _End(exit_code, job, step_after > step_before, is_own_code))
    facts = {"exit_code": exit_code, "first_step": step_before, "last_step": step_after}
    stop = _stop_of(run, attempt)
    words = {"reason": decision.reason, "action": decision.action, "note": decision.note + _save_left_out(stop)}
    if stop:
        words["asked_by"] = str(stop["asked_by"])
    if decision.reason == "failed":
        words["failed_on"] = _failed_on(run, site, attempt)
    if found := codes_of(read_record(run, attempt)):
        words["found"] = found
    wall = {"start_unix_s": start_unix_s, "end_unix_s": time.time()}
    seconds = read_account(run, attempt, **wall, step_before=step_before)
    if not seconds and not is_own_code:
        seconds["start_s"] = round(wall["end_unix_s"] - start_unix_s, 3)
    if site.queue_s is not None:
        # Ranks that are started again in the same allocation have waited for nothing.
        seconds["queue_s"] = site.queue_s if is_first_here else 0.0
    close_attempt(run, attempt, {**facts, **words, **seconds})
    say(f"attempt {attempt}: {decision.note}")
    return exit_code, decision


def _stop_of(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """Returns what the ranks said when they stopped as they were asked to, {} where they did not."""
    found = [event for event in read_events(run, "stop") if event.get("attempt") == attempt]
    return found[-1] if found else {}


def _save_left_out(stop: Mapping[str, Any]) -> str:
    if not stop or stop["saved"]:
        return ""
    return f"; no save at the stop: {stop['left_s']:.0f} s were left and a save takes {stop['save_s']:.0f} s"


@dataclass(frozen=True, slots=True)
class _End:
    """How the ranks of an attempt ended."""

    exit_code: int
    job: dict[str, str] | None
    is_fruitful: bool
    is_own_code: bool


def _decide(run: RunDirectory, settings: RequeueSection, site: Site, attempt: int, end: _End) -> Decision:
    """Returns what follows; ranks that are to be started again have room for it when it returns."""
    failed = end.exit_code not in (EXIT_DONE, EXIT_REQUEUE)
    mark = first_mark(run, attempt)
    # Nobody's own code has run where the nodes were found unfit before.
    has_not_begun = failed and bool(fatal_line(read_record(run, attempt)))
    # srun ends with 0 after a node failure, so its words count whatever its code.
    cause = site.explain(attempt) or (str(mark or "") if failed else "")
    outcome = Outcome(
        # srun gives one code for all ranks; the first one to fail knows better.
        exit_code=mark.exit_code if failed and mark is not None else end.exit_code,
        is_finished=run.result.exists(),
        stop_asked=run.stop_file.exists(),
        requeue_enabled=settings.enabled,
        has_slurm=site.start.job_id is not None,
        job=end.job,
        restart_count=site.start.restart_count,
        can_relaunch=settings.enabled and site.can_relaunch and (not end.is_own_code or has_not_begun),
        fruitless_failures=_fruitless_before(run) + (not end.is_fruitful),
        max_fruitless_failures=settings.max_fruitless_failures,
        bad_node="" if end.is_fruitful else _bad_node(run, site, attempt),
        is_bad_for_certain=bool(_found_bad(run, attempt)),
        cause=cause,
    )
    decision = decide(outcome)
    # `cancel` leaves a STOP file as well, and a job that was being preempted does not show that it was cancelled.
    if (decision.action == "requeue" or decision.reason == "stopped") and _is_cancelled(site, end.job):
        return CANCELLED
    if decision.action == "relaunch" and not site.clear(attempt):
        note = f"{cause}; what is left of the ranks does not end, so the job is requeued"
        return replace(decision, action="requeue", note=note)
    if decision.reason == "requeued" and (job_id := site.start.job_id) is not None:
        why = why_restarted(site.start, site.past_ends(job_id))
        if why == "preempted":
            return replace(decision, reason="preempted", note=f"preempted; {decision.note}")
        if why == "node_failure":
            return replace(decision, reason="node_failure", note=f"a node was lost; {decision.note}")
    return decision


def _failed_on(run: RunDirectory, site: Site, attempt: int) -> str:
    """Returns the node that an attempt failed on, "" where that is not known."""
    mark = first_mark(run, attempt)
    found = _found_bad(run, attempt) or named_node(read_record(run, attempt))
    return found or node_of(site.explain(attempt)) or (mark.host if mark is not None else "")


def _found_bad(run: RunDirectory, attempt: int) -> str:
    """Returns the nodes that an attempt has found bad before it began, with commas; "" if none."""
    return ",".join(bad_nodes(read_record(run, attempt)))


def _bad_node(run: RunDirectory, site: Site, attempt: int) -> str:
    if found := _found_bad(run, attempt):
        return found if site.can_avoid(found) else ""
    node = _failed_on(run, site, attempt)
    return node if node and node == last_bad_node(read_ledger(run)[:-1]) and site.can_avoid(node) else ""


def _has_attempt_of(run: RunDirectory, start: AttemptStart) -> bool:
    same = (start.job_id, start.restart_count)
    return any((entry.get("job_id"), entry.get("restart_count")) == same for entry in read_ledger(run))


def say(text: str) -> None:
    """Prints a line for the person to stderr (batch.log in a job)."""
    print(f"slurm_train: {text}", file=sys.stderr, flush=True)


def ignore_stop_signals() -> None:
    """Lets the signals that ask the ranks to stop pass by the supervisor, which waits for them to end."""
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGUSR1):
        # A handler, not SIG_IGN: an ignored signal would be inherited by the ranks.
        signal.signal(number, lambda *_: None)


def _is_undisturbed(job: dict[str, str] | None) -> bool:
    # srun ends with 0 after a node failure, too; the job's state tells the two apart.
    return job is None or job.get("JobState") == "RUNNING"


def _fruitless_before(run: RunDirectory) -> int:
    count = 0
    for entry in reversed(read_ledger(run)):
        if entry.get("reason") in _NO_FAULT or "end_time_unix_s" not in entry:
            continue
        if int(entry.get("last_step", 0)) > int(entry.get("first_step", 0)):
            break
        count += 1
    return count


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
        attempt, facts = existing_attempts(run)[-1], asdict(CANCELLED)
        close_attempt(run, attempt, {name: facts[name] for name in ("reason", "action", "note")})
        say(f"attempt {attempt}: {CANCELLED.note}")
        return EXIT_FAILURE
    new_id = site.resubmit(decision)
    if not new_id:
        say("Slurm did not confirm the requeue; `resume` continues the run")
        return EXIT_FAILURE
    say(f"this job cannot be requeued; job {new_id} takes over when it has ended")
    return EXIT_REQUEUE


def _is_cancelled(site: Site, job: dict[str, str] | None) -> bool:
    job_id = site.start.job_id
    return job is not None and job_id is not None and was_cancelled(site.start, job, lambda: site.past_ends(job_id))
