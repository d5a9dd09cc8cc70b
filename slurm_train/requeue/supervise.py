"""Supervises one attempt: opens it, runs the ranks, reads what they left, writes the ledger, acts on the decision.

Runs where the batch script runs: on the head node, outside any container, without torch. Everything is written before
`scontrol requeue` is called, because Slurm kills this process by it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_train.config.schema import RequeueSection
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_REQUEUE
from slurm_train.requeue.decision import Decision, Outcome, decide
from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt, read_ledger
from slurm_train.rundir.files import read_lines, write_atomic
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lock import Holder, release_lock, take_lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the supervisor asks of the world around it; local runs have answers of their own."""

    start: AttemptStart
    holder: Holder
    is_alive: Callable[[Holder], bool]
    """Whether another holder of the run's lock still lives."""
    show_job: Callable[[], dict[str, str] | None]
    """This job's record, None where there is none or Slurm does not answer."""
    requeue: Callable[[], bool]
    """Requeues this job; returns whether Slurm confirmed it."""


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
        RunError: somebody else runs this directory.
    """
    take_lock(run, site.holder, is_alive=site.is_alive)
    try:
        if run.result.exists():
            say(f"{run.path} is finished already; see {run.result}")
            return EXIT_DONE
        attempt = open_attempt(run, site.start)
        step_before = last_step(run)
        exit_code = launch(attempt)
        job = site.show_job()
        if is_own_code and exit_code == EXIT_DONE and _is_undisturbed(job):
            write_atomic(
                run.result, json.dumps({"exit_code": 0, "attempt": attempt, "time_unix_s": time.time()}) + "\n"
            )
        decision = decide(_outcome(run, settings, site, job, exit_code, step_before))
        facts: dict[str, Any] = {
            "reason": decision.reason,
            "action": decision.action,
            "note": decision.note,
            "exit_code": exit_code,
            "first_step": step_before,
            "last_step": last_step(run),
        }
        close_attempt(run, attempt, facts)
    finally:
        release_lock(run, site.holder)
    say(f"attempt {attempt}: {decision.note}")
    return _act(decision, site, exit_code)


def last_step(run: RunDirectory) -> int:
    """Returns the newest optimizer step on record in metrics.jsonl, 0 before the first."""
    return max((int(line.get("step", 0)) for line in read_lines(run.metrics)), default=0)


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


def _outcome(
    run: RunDirectory,
    settings: RequeueSection,
    site: Site,
    job: dict[str, str] | None,
    exit_code: int,
    step_before: int,
) -> Outcome:
    return Outcome(
        exit_code=exit_code,
        is_finished=run.result.exists(),
        stop_asked=run.stop_file.exists(),
        requeue_enabled=settings.enabled,
        has_slurm=site.start.job_id is not None,
        job=job,
        restart_count=site.start.restart_count,
        fruitless_attempts=_fruitless_before(run) + (last_step(run) <= step_before),
        max_fruitless_attempts=settings.max_fruitless_attempts,
    )


def _fruitless_before(run: RunDirectory) -> int:
    count = 0
    for entry in reversed(read_ledger(run)):
        if "end_time_unix_s" not in entry or entry.get("reason") == "preempted":
            continue
        if int(entry.get("last_step", 0)) > int(entry.get("first_step", 0)):
            break
        count += 1
    return count


def _act(decision: Decision, site: Site, exit_code: int) -> int:
    if decision.action == "finish":
        return EXIT_DONE
    if decision.action == "requeue" and not site.requeue():
        say("Slurm did not confirm the requeue; `resume` continues the run")
        return EXIT_FAILURE
    if decision.action in ("requeue", "leave"):
        _wait_for_the_end()
        return EXIT_REQUEUE
    return exit_code or EXIT_FAILURE


def _wait_for_the_end(limit_s: float = 60.0) -> None:
    # Slurm kills a requeued job; a script that ends by itself first could be booked as finished.
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        signal.sigtimedwait([signal.SIGINT], 1.0)
