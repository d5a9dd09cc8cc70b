"""Campaign `hang`: a random rank of a run on Slurm is stopped at a random moment; the watchdog must say who and go on.

Several runs at once, each in a thread. The rank gets SIGSTOP, so it answers nothing but KILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_events
from slurm_train.rundir.heartbeat import Beat, Limits, read_beats
from slurm_train.rundir.layout import RunDirectory
from tests.campaigns.hang_trials import HANG_S, SLACK_S, START_S, Seen, Trial, plan_trials, what_is_wrong
from tests.campaigns.result import Result
from tests.support.command_line import Person, new_project
from tests.support.process_faults import rank_pid
from tests.support.slurm_runs import wait_until_finished, wait_until_step
from tests.support.waiting import wait_for
from tests.support.wide_model import WIDE_MODULE

_AT_ONCE = 5
_LIMITS = Limits(START_S, HANG_S)
_PATIENCE_S = 300.0


def run(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs the trials and returns how often the promise was kept."""
    person = Person(new_project(folder / "project"))
    (person.folder / "tiny.py").write_text(WIDE_MODULE)
    over: list[float] = []
    problems: list[str] = []

    def judge(trial: Trial) -> None:
        try:
            seen = _try(person, trial)
            problem = what_is_wrong(seen)
            over.append(seen.ended_s - seen.limit_s)
            said = "; ".join(event["sentence"] for event in seen.events)
            how = f"ended {seen.ended_s:.1f} s after the stop (time-out {seen.limit_s:.0f} s): {said}"
        except (AssertionError, OSError, subprocess.TimeoutExpired) as err:
            problem, how = f"no trial: {str(err).partition(chr(10))[0]}", ""
        print(f"{trial}: {problem or how}", flush=True)
        problems.extend([f"{trial}: {problem}"] if problem else [])

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(judge, plan_trials(seed=seed, trials=trials)))
    figures = {"end of the step after the time-out": f"{max(over):.1f} s at most"} if over else {}
    return Result(trials=trials, held=trials - len(problems), figures=figures, problems=tuple(sorted(problems)))


def _try(person: Person, trial: Trial) -> Seen:
    name = f"{person.folder.parent.name}-{trial.number}"
    job, run = person.types(*trial.words, f"run.name={name}").job_and_run
    pid = 0
    try:
        _wait_for_the_moment(run, trial)
        pid = rank_pid(run, trial.rank)
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        beats = wait_for(lambda: _two(run), within_s=START_S, what="the beats of both ranks")
        limit_s = max(_LIMITS.of(settled=beat.settled) for beat in beats.values())
        wait_for(lambda: "reason" in read_ledger(run)[0], within_s=limit_s + 3 * SLACK_S, what="the end of the step")
        ended_s = time.monotonic() - stopped_s
        wait_until_finished(run, within_s=_PATIENCE_S)
    finally:
        person.runs("scancel", "--quiet", job)
    return Seen(
        rank=trial.rank,
        host=beats[trial.rank].source.host,
        limit_s=limit_s,
        ended_s=ended_s,
        events=read_events(run, "hang"),
        stacks=[rank for rank in range(2) if _has_frames(run, rank)],
        ledger=read_ledger(run),
        steps=[line["step"] for line in read_metrics(run.metrics) if "loss" in line],
    )


def _wait_for_the_moment(run: RunDirectory, trial: Trial) -> None:
    if trial.phase == "start":
        wait_for(lambda: trial.rank in read_beats(run, 0), within_s=_PATIENCE_S, what="a beat", poll_s=0.1)
        time.sleep(trial.delay_s)  # not a wait for anything: the moment is the trial
        return
    wait_until_step(run, 2, within_s=_PATIENCE_S)
    time.sleep(trial.delay_s)  # likewise
    if trial.phase in ("save", "evaluate"):
        wait_for(lambda: _phase(run, trial.rank) == trial.phase, within_s=60, what=trial.phase, poll_s=0.02)


def _two(run: RunDirectory) -> dict[int, Beat]:
    beats = read_beats(run, 0)
    return beats if len(beats) == 2 else {}


def _phase(run: RunDirectory, rank: int) -> str:
    beat = read_beats(run, 0).get(rank)
    return "" if beat is None else beat.phase


def _has_frames(run: RunDirectory, rank: int) -> bool:
    path = run.stacks(0, rank)
    return path.exists() and "  File " in path.read_text(errors="replace")
