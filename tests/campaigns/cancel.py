"""Campaign `cancel`: runs are cancelled at random moments of their lives; none may ever come back.

Many runs at once, each in a thread that brings it to its moment; then all of a batch are watched together for longer
than a requeue takes. About a third of the trials use ranks without torch, where only the supervisor is tried.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory, existing_attempts
from slurm_train.rundir.timing import newest_training_line
from slurm_train.slurm.commands import SlurmCommands
from tests.campaigns.cancel_trials import FORMS, PHASES, STEP_S, Aftermath, Trial, plan_trials, trains, what_is_wrong
from tests.campaigns.result import Result
from tests.support.command_line import TINY, Person, new_project
from tests.support.process_faults import kill, rank_pid
from tests.support.qos_pair import qos_pair
from tests.support.waiting import wait_for
from tests.support.wide_model import WIDE_MODULE

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
print("trains", flush=True)
time.sleep(3600)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A run that was cancelled."""

    trial: Trial
    job: str
    run: RunDirectory
    time_unix_s: float
    restarts: int


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs the trials in batches and returns how many cancels were obeyed."""
    person = Person(new_project(folder / "project"))
    (person.folder / "light.py").write_text(_LIGHT)
    (person.folder / "tiny.py").write_text(WIDE_MODULE)
    planned = plan_trials(seed=seed, trials=trials)
    problems: list[str] = []
    by_phase: Counter[str] = Counter()
    todo, rounds = planned, 0
    with qos_pair("campaigncancel", grace_s=_GRACE_S) as (weak, strong):
        while todo:
            batch, todo = todo[:_BATCH], todo[_BATCH:]
            for trial, problem in _try_batch(person, batch, weak=weak, strong=strong):
                print(f"{trial}: {problem or 'cancelled'}", flush=True)
                if problem.startswith(_NO_TRIAL) and rounds < _MOST_ROUNDS:
                    # Slurm did not bring the run to its moment, so nothing was cancelled there; it is another try.
                    rounds += 1
                    todo = [*todo, replace(trial, number=trials + rounds)]
                    continue
                by_phase[trial.phase] += 1
                problems += [f"{trial}: {problem}"] if problem else []
    figures = {
        "by phase": ", ".join(f"{name} {count}" for name, count in sorted(by_phase.items())),
        "ranks without torch": str(sum(PHASES[trial.phase].is_light for trial in planned)),
        "tried again, as the moment did not come": str(rounds),
    }
    return Result(trials=trials, held=trials - len(problems), figures=figures, problems=tuple(problems))


def _try_batch(person: Person, batch: list[Trial], *, weak: str, strong: str) -> list[tuple[Trial, str]]:
    commands = SlurmCommands(person.environment())
    try:
        found: list[tuple[Trial, Cancelled | str]] = []
        ordinary = [trial for trial in batch if PHASES[trial.phase].fault != "preempt"]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found += zip(ordinary, pool.map(lambda trial: _attempt(person, trial, commands), ordinary), strict=True)
        victims = [trial for trial in batch if PHASES[trial.phase].fault == "preempt"]
        if victims:
            found += _preempt_and_cancel(person, victims, commands, weak=weak, strong=strong)
        return _watch(person, found, commands)
    finally:
        _cancel_all(person)


def _attempt(person: Person, trial: Trial, commands: SlurmCommands) -> Cancelled | str:
    """Returns the run after its cancel, or why the trial came to nothing."""
    try:
        job, run = _submit(person, trial)
        _bring_there(trial, job, run, commands)
        return _cancel(person, trial, job, run, commands)
    except (AssertionError, ClusterError, OSError, subprocess.TimeoutExpired) as err:
        return f"{_NO_TRIAL}: {str(err).partition(chr(10))[0]}"


def _submit(person: Person, trial: Trial, *words: str) -> tuple[str, RunDirectory]:
    phase = PHASES[trial.phase]
    # Slurm remembers jobs for a while, also those of another campaign.
    name = f"{person.folder.parent.name}-{trial.number}"
    words = (f"run.name={name}", f"seed={trial.number}", *phase.words, *words)
    if phase.is_light:
        return person.types("+cluster=1x1", "script=[light.py]", "batch.global_size=16", *words).job_and_run
    endless = ("train.max_steps=100000", f"model.step_s={STEP_S}")
    return person.types("+cluster=1x1", *TINY, *endless, *words).job_and_run


def _bring_there(trial: Trial, job: str, run: RunDirectory, commands: SlurmCommands) -> None:
    phase = PHASES[trial.phase]
    wait_for(lambda: phase.is_there(run), within_s=_PATIENCE_S, what=f"{trial.phase} of {run.path}", poll_s=0.05)
    if phase.fault == "kill":
        kill(rank_pid(run, 0))
    if phase.fault == "warn":
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
    if phase.after_restart:
        wait_for(lambda: commands.restarts(job) == 1, within_s=60, what="the requeue", poll_s=0.1)
    time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial


def _cancel(person: Person, trial: Trial, job: str, run: RunDirectory, commands: SlurmCommands) -> Cancelled:
    if trial.form == "cancel RUN":
        done = person.types("cancel", run.name)
    else:
        done = person.runs(*FORMS[trial.form], job)
        if trial.form == "scancel twice":
            time.sleep(trial.delay_s % 0.5)  # likewise
            person.runs("scancel", job)
    assert done.code == 0, f"{trial.form}: exit code {done.code}: {done.err.strip()}"
    return Cancelled(trial=trial, job=job, run=run, time_unix_s=time.time(), restarts=commands.restarts(job))


def _preempt_and_cancel(
    person: Person, victims: list[Trial], commands: SlurmCommands, *, weak: str, strong: str
) -> list[tuple[Trial, Cancelled | str]]:
    """Preempts all of them at once, and cancels each within the grace or right after it."""
    words = (f"cluster.qos={weak}", f"cluster.nodelist={_NODE}")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        started = list(pool.map(lambda trial: _submit(person, trial, *words), victims))
        for _, run in started:
            wait_for(lambda run=run: trains(run), within_s=_PATIENCE_S, what=f"{run.path}")
        flags = ("--parsable", f"--qos={strong}", f"--nodelist={_NODE}", "--exclusive", "--output=/dev/null")
        urgent = person.runs("sbatch", *flags, "--wrap=sleep 1").out.strip()

        def cancel(trial: Trial, job: str, run: RunDirectory) -> Cancelled | str:
            try:
                wait_for(lambda: _is_preempted(commands.show_job(job)), within_s=90, what="the preemption", poll_s=0.1)
                time.sleep(trial.delay_s)
                return _cancel(person, trial, job, run, commands)
            except (AssertionError, ClusterError, subprocess.TimeoutExpired) as err:
                return f"{_NO_TRIAL}: {str(err).partition(chr(10))[0]}"

        cancelled = list(pool.map(lambda pair: cancel(pair[0], *pair[1]), zip(victims, started, strict=True)))
    person.runs("scancel", urgent)
    return list(zip(victims, cancelled, strict=True))


def _is_preempted(job: dict[str, str]) -> bool:
    return job.get("PreemptTime", "None") not in ("None", "Unknown") or job.get("Restarts") == "1"


def _watch(
    person: Person, found: list[tuple[Trial, Cancelled | str]], commands: SlurmCommands
) -> list[tuple[Trial, str]]:
    """Returns what is wrong with each, once the last one was cancelled long enough ago."""
    cancelled = [one for _, one in found if isinstance(one, Cancelled)]
    last = max((one.time_unix_s for one in cancelled), default=0.0)
    time.sleep(max(0.0, last + _WATCH_S - time.time()))  # nothing may happen, so there is nothing to wait for
    status = {row["path"]: row["state"] for row in json.loads(person.types("status", "--json").out or "[]")}
    named = person.runs("squeue", "-h", "-t", "all", "-o", "%i|%j").out.split()
    judged = []
    for trial, one in found:
        if isinstance(one, str):
            judged.append((trial, one))
            continue
        try:
            judged.append((trial, what_is_wrong(_aftermath(one, status=status, named=named, commands=commands))))
        except (AssertionError, ClusterError) as err:
            judged.append((trial, f"{_NO_TRIAL}: {err}"))
    return judged


def _aftermath(one: Cancelled, *, status: dict[str, str], named: list[str], commands: SlurmCommands) -> Aftermath:
    job, line = commands.show_job(one.job), newest_training_line(one.run.metrics) or {}
    pairs = (word.partition("|") for word in named)
    of_name = {job_id for job_id, _, name in pairs if name == f"{one.run.name}-{one.run.run_id}"}
    assert one.job in of_name, f"squeue does not show job {one.job}"
    known = {str(job_id) for job_id in (read_json(one.run.job) or {}).get("job_ids", [])}
    starts = [entry["time_unix_s"] for entry in read_ledger(one.run)]
    assert len(starts) == len(existing_attempts(one.run)), f"{one.run.path}: an attempt is not in the ledger"
    return Aftermath(
        form=one.trial.form,
        state=job.get("JobState", ""),
        restarts_then=one.restarts,
        restarts=int(job.get("Restarts", "0")),
        jobs=tuple(sorted({*of_name, *known})),
        attempts_late_s=tuple(start - one.time_unix_s for start in starts),
        step_late_s=float(line.get("time_unix_s", 0.0)) - one.time_unix_s,
        status=status.get(str(one.run.path), ""),
        is_finished=one.run.result.exists(),
    )


def _cancel_all(person: Person) -> None:
    jobs = [(read_json(path) or {}).get("job_ids", []) for path in person.folder.glob("runs/*/*/job.json")]
    with suppress(subprocess.TimeoutExpired):
        person.runs("scancel", "--quiet", *(str(job_id) for ids in jobs for job_id in ids))
