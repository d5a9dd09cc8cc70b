"""Campaign `cancel`: runs are cancelled at random moments of their lives; none may ever come back.

Many runs at once, each in a thread that brings it to its moment; then all of a batch are watched together for longer
than a requeue takes. About a third of the trials use ranks without torch, where only the supervisor is tried.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import last_lines, read_json
from slurm_train.rundir.heartbeat import read_beats
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.slurm.commands import SlurmCommands
from tests.campaigns.record import Tally, first_line, only_true
from tests.support.cluster_faults import qos_pair
from tests.support.command_line import TINY, WIDE_MODULE, Person
from tests.support.ledgers import ledger_lines
from tests.support.process_faults import kill, rank_pid
from tests.support.slurm_runs import at_work, cancel_all, command
from tests.support.waiting import wait_for

T = TypeVar("T")
_AT_ONCE = 10
_BATCH = 44
_WATCH_S = 14.0
"""Longer than a requeued job of this cluster waits (7 s), and than LATE_S."""
_GRACE_S = 12
_PATIENCE_S = 180.0
_NO_TRIAL = "no trial"
_MOST_ROUNDS = 20
_NODE = "node4"

_LIGHT = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda *_: (time.sleep(1.0), os._exit(75)))
print("trains")
time.sleep(3600)
"""


class Phase(NamedTuple):
    """Where in its life a run is cancelled: a random moment within `span_s` after `is_there`.

    Args:
        share: of the trials, relative to the other phases.
        span_s: seconds.
        is_there: asked of the run and its Restarts.
        words: what the run is given.
        fault: what is done to it once it trains: "kill" (a rank), "warn" (as before a time limit), "preempt", "".
        is_light: its ranks run a script without torch, so that it is the supervisor that is tried.
    """

    share: int
    span_s: float
    is_there: Callable[[RunDirectory], bool] = lambda _: True
    words: tuple[str, ...] = ()
    fault: str = ""
    after_restart: bool = False
    is_light: bool = False


def trains(run: RunDirectory) -> bool:
    """Returns whether the run has done steps (or a script without torch says so)."""
    if newest_training_line(run).get("step", 0) >= 2:
        return True
    attempts = existing_attempts(run)
    log = run.rank_log(attempts[-1], 0) if attempts else None
    return log is not None and log.exists() and b"trains" in log.read_bytes()


PHASES: dict[str, Phase] = {
    "pending": Phase(share=2, span_s=1.0, words=("cluster.sbatch.begin=now+3600",)),
    "just submitted": Phase(share=4, span_s=1.5),
    "importing": Phase(share=3, span_s=2.0, is_there=lambda run: bool(existing_attempts(run))),
    "rendezvous": Phase(
        share=3, span_s=5.0, is_there=lambda run: len(read_beats(run, 0)) == 2, words=("cluster.gpus_per_node=2",)
    ),
    "training": Phase(share=3, span_s=1.0, is_there=trains),
    "saving": Phase(
        share=3,
        span_s=0.2,
        is_there=lambda run: any(run.checkpoints.glob("*.tmp")),
        words=("checkpoint.every_steps=1", "model.width=1024"),
    ),
    "relaunch": Phase(share=4, span_s=4.0, is_there=trains, fault="kill"),
    "in the requeue": Phase(share=4, span_s=1.5, is_there=trains, fault="warn", is_light=True),
    "saving for the requeue": Phase(share=2, span_s=2.0, is_there=trains, fault="warn"),
    "requeued": Phase(share=4, span_s=13.0, is_there=trains, fault="warn", after_restart=True, is_light=True),
    "preempted": Phase(share=2, span_s=2.5, is_there=trains, fault="preempt", is_light=True),
}

FORMS = {
    "scancel": 8,
    "scancel twice": 3,
    "cancel RUN": 3,
    "scancel --full": 1,
    "scancel --signal=KILL": 1,
    "scancel --full --signal=KILL": 1,
    "scancel --batch": 1,
}
"""How it is cancelled, and how often. `scancel --batch` kills the batch script alone: Slurm calls such a job FAILED."""


class Trial(NamedTuple):
    """One run and when and how it is cancelled."""

    number: int
    phase: str
    delay_s: float
    form: str

    def __str__(self) -> str:
        return f"trial {self.number} ({self.phase} + {self.delay_s:.2f} s, {self.form})"


def plan_trials(*, seed: int, trials: int) -> list[Trial]:
    """Returns the trials: every phase by its share, moments and forms at random."""
    chance = random.Random(seed)
    names = [name for name, phase in PHASES.items() for _ in range(phase.share)]
    # A few trials are to see different phases, so the list is gone through in an even mixture.
    chance.shuffle(names)
    ordered = sorted(range(len(names)), key=lambda index: (names[:index].count(names[index]), index))
    planned = []
    for number in range(trials):
        phase = names[ordered[number % len(names)]]
        # A job without a batch script has none to kill; what is not running cannot be sent a signal.
        early = phase in ("pending", "just submitted", "requeued")
        forms = list(FORMS)[: 3 if early else None]
        form = chance.choices(forms, [FORMS[form] for form in forms])[0]
        delay_s = chance.uniform(0.0, PHASES[phase].span_s)
        planned.append(Trial(number, phase, delay_s, form))
    return planned


LATE_S = 10.0
"""A cancelled job has KillWait (5 s here) to end in; nothing may happen to the run after that."""


def what_is_wrong(
    *,
    form: str,
    state: str,
    restarts_then: int,
    restarts: int,
    jobs: Sequence[str],
    attempts_late_s: Sequence[float],
    step_late_s: float,
    status: str,
    is_finished: bool,
) -> list[str]:
    """Returns how a cancel was not obeyed, from what there is to see later than a requeue would take.

    Args:
        form: how it was cancelled.
        state: Slurm's word for the job.
        restarts_then: right after the cancel.
        restarts: now.
        jobs: all that the run has ever had, or that have its name.
        attempts_late_s: begins of attempts, in seconds after the cancel.
        step_late_s: newest step, in seconds after the cancel.
        status: what `status` calls the run.
        is_finished: whether it has a result.
    """
    wanted = ("FAILED", "CANCELLED") if form == "scancel --batch" else ("CANCELLED",)
    latest_s = max(attempts_late_s, default=0.0)
    return only_true(
        {
            f"the job is {state}": state not in wanted,
            f"Restarts rose from {restarts_then} to {restarts}": restarts > restarts_then,
            f"the run has other jobs: {', '.join(jobs)}": len(jobs) > 1,
            f"an attempt began {latest_s:.1f} s later": latest_s > LATE_S,
            f"it still trained {step_late_s:.1f} s later": step_late_s > LATE_S,
            f"status calls it {status!r}": status.upper() not in wanted,
            "it was finished before it was cancelled": is_finished,
        }
    )


class Cancelled(NamedTuple):
    """A run that was cancelled."""

    trial: Trial
    job: str
    run: RunDirectory
    time_unix_s: float
    restarts: int


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs the trials in batches and returns how many cancels were obeyed."""
    by_phase, rounds = Counter[str](), 0
    todo = planned = plan_trials(seed=seed, trials=trials)
    with qos_pair("campaigncancel", grace_s=_GRACE_S) as (weak, strong), at_work(folder) as person:
        (person.folder / "light.py").write_text(_LIGHT)
        (person.folder / "tiny.py").write_text(WIDE_MODULE)
        while todo:
            batch, todo = todo[:_BATCH], todo[_BATCH:]
            for trial, problems in _try_batch(person, batch, weak=weak, strong=strong):
                if any(problem.startswith(_NO_TRIAL) for problem in problems) and rounds < _MOST_ROUNDS:
                    # Slurm did not bring the run to its moment, so nothing was cancelled there; it is another try.
                    rounds += 1
                    print(f"{trial}: {problems[0]}")
                    todo = [*todo, trial._replace(number=trials + rounds)]
                    continue
                by_phase[trial.phase] += 1
                tally.add(str(trial), problems)
    return {
        "by phase": ", ".join(f"{name} {count}" for name, count in sorted(by_phase.items())),
        "ranks without torch": str(sum(PHASES[trial.phase].is_light for trial in planned)),
        "tried again, as the moment did not come": str(rounds),
    }


def _try_batch(person: Person, batch: list[Trial], *, weak: str, strong: str) -> list[tuple[Trial, list[str]]]:
    commands = SlurmCommands(person.environment())

    def cancel(trial: Trial) -> Cancelled:
        job, run = _submit(person, trial)
        _bring_there(trial, job, run, commands)
        return _cancel(person, trial, job, run, commands)

    try:
        ordinary = [trial for trial in batch if PHASES[trial.phase].fault != "preempt"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(lambda trial: _unless_nothing(cancel, trial), ordinary))
        victims = [trial for trial in batch if PHASES[trial.phase].fault == "preempt"]
        if victims:
            found += _preempt_and_cancel(person, victims, commands, weak=weak, strong=strong)
        return list(zip([*ordinary, *victims], _watch(person, found, commands), strict=True))
    finally:
        cancel_all(person)


def _unless_nothing(work: Callable[..., T], *arguments: object) -> T | str:
    """Returns what the work gives, or why the trial came to nothing."""
    try:
        return work(*arguments)
    except (AssertionError, ClusterError, OSError, subprocess.TimeoutExpired) as err:
        return f"{_NO_TRIAL}: {first_line(err)}"


def _submit(person: Person, trial: Trial, *words: str) -> tuple[str, RunDirectory]:
    phase = PHASES[trial.phase]
    # Slurm remembers jobs for a while, also those of another campaign.
    name = f"{person.folder.parent.name}-{trial.number}"
    words = (f"run.name={name}", f"seed={trial.number}", *phase.words, *words)
    if phase.is_light:
        return person.types("+cluster=1x1", "script=[light.py]", "batch.global_size=16", *words).job_and_run
    endless = ("train.max_steps=100000", "model.step_s=0.02")
    return person.types("+cluster=1x1", *TINY, *endless, *words).job_and_run


def _bring_there(trial: Trial, job: str, run: RunDirectory, commands: SlurmCommands) -> None:
    phase = PHASES[trial.phase]
    wait_for(lambda: phase.is_there(run), within_s=_PATIENCE_S, what=f"{trial.phase} of {run.path}", poll_s=0.05)
    if phase.fault == "kill":
        kill(rank_pid(run, 0))
    if phase.fault == "warn":
        command("scancel", "--signal=USR2", job)
    if phase.after_restart:
        wait_for(lambda: commands.restarts(job) == 1, within_s=60, what="the requeue", poll_s=0.1)
    time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial


def _cancel(person: Person, trial: Trial, job: str, run: RunDirectory, commands: SlurmCommands) -> Cancelled:
    if trial.form == "cancel RUN":
        done = person.types("cancel", run.name)
    else:
        done = person.runs(*trial.form.removesuffix(" twice").split(), job)
        if trial.form == "scancel twice":
            time.sleep(trial.delay_s % 0.5)  # likewise
            person.runs("scancel", job)
    assert done.code == 0, f"{trial.form}: exit code {done.code}: {done.err.strip()}"
    return Cancelled(trial, job, run, time.time(), commands.restarts(job))


def _preempt_and_cancel(
    person: Person, victims: list[Trial], commands: SlurmCommands, *, weak: str, strong: str
) -> list[Cancelled | str]:
    """Preempts all of them at once, and cancels each within the grace or right after it."""
    words = (f"cluster.qos={weak}", f"cluster.nodelist={_NODE}")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started = list(pool.map(lambda trial: _submit(person, trial, *words), victims))
        for _, run in started:
            wait_for(lambda run=run: trains(run), within_s=_PATIENCE_S, what=f"{run.path}")
        flags = ("--parsable", f"--qos={strong}", f"--nodelist={_NODE}", "--exclusive", "--output=/dev/null")
        urgent = person.runs("sbatch", *flags, "--wrap=sleep 1").out.strip()

        def cancel(trial: Trial, job: str, run: RunDirectory) -> Cancelled:
            wait_for(lambda: _is_preempted(commands.show_job(job)), within_s=90, what="the preemption", poll_s=0.1)
            time.sleep(trial.delay_s)
            return _cancel(person, trial, job, run, commands)

        pairs = zip(victims, started, strict=True)
        cancelled = list(pool.map(lambda pair: _unless_nothing(cancel, pair[0], *pair[1]), pairs))
    person.runs("scancel", urgent)
    return cancelled


def _is_preempted(job: dict[str, str]) -> bool:
    return job.get("PreemptTime", "None") not in ("None", "Unknown") or job.get("Restarts") == "1"


def _watch(person: Person, found: list[Cancelled | str], commands: SlurmCommands) -> list[list[str]]:
    """Returns what is wrong with each, once the last one was cancelled long enough ago."""
    last = max((one.time_unix_s for one in found if isinstance(one, Cancelled)), default=0.0)
    time.sleep(max(0.0, last + _WATCH_S - time.time()))  # nothing may happen, so there is nothing to wait for
    status = {row["path"]: row["state"] for row in json.loads(person.types("status", "--json").out or "[]")}
    named = person.runs("squeue", "-h", "-t", "all", "-o", "%i|%j").out.split()

    judged = [one if isinstance(one, str) else _unless_nothing(_judge, one, status, named, commands) for one in found]
    return [[one] if isinstance(one, str) else one for one in judged]


def newest_training_line(run: RunDirectory) -> dict[str, Any]:
    """Returns the newest line with a loss, {} before the first."""
    return next((line for line in reversed(last_lines(run.metrics)) if "loss" in line), {})


def _judge(one: Cancelled, status: dict[str, str], named: list[str], commands: SlurmCommands) -> list[str]:
    job, line = commands.show_job(one.job), newest_training_line(one.run)
    pairs = (word.partition("|") for word in named)
    of_name = {job_id for job_id, _, name in pairs if name == f"{one.run.name}-{one.run.run_id}"}
    assert one.job in of_name, f"squeue does not show job {one.job}"
    known = {str(job_id) for job_id in (read_json(one.run.job) or {}).get("job_ids", [])}
    starts = [entry["time_unix_s"] for entry in ledger_lines(one.run)]
    assert len(starts) == len(existing_attempts(one.run)), f"{one.run.path}: an attempt is not in the ledger"
    return what_is_wrong(
        form=one.trial.form,
        state=job.get("JobState", ""),
        restarts_then=one.restarts,
        restarts=int(job.get("Restarts", "0")),
        jobs=sorted({*of_name, *known}),
        attempts_late_s=[start - one.time_unix_s for start in starts],
        step_late_s=float(line.get("time_unix_s", 0.0)) - one.time_unix_s,
        status=status.get(str(one.run.path), ""),
        is_finished=one.run.result.exists(),
    )
