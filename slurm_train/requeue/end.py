"""What the supervisor asks of the world around it, and what it finds when the ranks of an attempt have ended.

Nothing is sure to be readable then: each fact has a default, and the decision is made from what can be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slurm_train.errors import EXIT_DONE, EXIT_REQUEUE
from slurm_train.requeue.bad_nodes import node_of
from slurm_train.requeue.best_effort import BestEffort, say
from slurm_train.requeue.budget import course_of, is_fruitful
from slurm_train.requeue.decision import Decision
from slurm_train.rundir.attempts import AttemptStart, overtaken, publish_result, read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.lock import Holder
from slurm_train.rundir.marks import FailureMark, first_mark
from slurm_train.rundir.preflight import bad_nodes, codes_of, fatal_line, named_node, read_record
from slurm_train.rundir.progress import last_step
from slurm_train.rundir.rounds import Round, newest_round, read_round
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
    record = known("the preflight's record", lambda: read_record(run, attempt), dict[str, Any]())
    found_bad = known("the preflight's record", lambda: ",".join(bad_nodes(record)), "")
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
