"""Programs that end with 0 in many ways, stopped in many ways: none is finished before its end, no good end is early.

The programs are as people write them: they save in a handler and exit, break off, catch everything, refuse at their
second start, end by `os._exit`. Each runs under the product's own supervisor until it is finished or nothing more can
come of it. What it has really done is in a file of its own.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stderr
from pathlib import Path
from typing import NamedTuple

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RequeueSection, RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.job import Job
from slurm_train.supervise.supervisor import Supervisor
from slurm_train.worker import script_main
from tests.campaigns.record import Tally
from tests.support.ledgers import ledger_lines
from tests.support.steps import FunctionStep
from tests.support.waiting import wait_for

STEPS = 16
_MOST_ATTEMPTS = 5
_PATIENCE_S = 120.0
_STATE = """
import os, signal, sys, time
from pathlib import Path
run_folder = Path(os.environ["SLURM_TRAIN_RUN_DIR"])
state, truth, total = run_folder / "state", run_folder / "truth", int(sys.argv[1])
done = int(state.read_text()) if state.exists() else 0
asked = []
def handle():
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: asked.append(1))
def train(step):
    time.sleep(0.02)
    print(f"step {step} of {total}", flush=True)
def keep(step):
    state.with_name("new").write_text(str(step))
    state.with_name("new").replace(state)
"""
_JOIN = """
from slurm_train import session
run = session.join()
"""
_END = """
truth.write_text("end")
"""
PROGRAMS = {
    "saves on a signal, exits with 0": """
handle()
for step in range(done + 1, total + 1):
    train(step)
    if asked: keep(step); sys.exit(0)
""",
    "exits in its handler": """
step = done
def leave(*_): keep(step); sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, leave)
while step < total:
    train(step + 1)
    step += 1
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, signal.SIG_IGN)
""",
    "knows of no signal": """
for step in range(done + 1, total + 1):
    train(step); keep(step)
""",
    "leaves": _JOIN
    + """
for step in range(done + 1, total + 1):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop(): run.leave()
""",
    "breaks off": _JOIN
    + """
for step in range(done + 1, total + 1):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop() and step < total: break
else:
"""
    + "".join(f"    {line}\n" for line in _END.strip().splitlines())
    + """
run.mark("end")
os._exit(0)
""",
    "catches its leave": _JOIN
    + """
try:
    for step in range(done + 1, total + 1):
        train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
        if run.should_stop() and step < total: run.leave()
except BaseException:
    print("interrupted", flush=True)
    os._exit(0)
""",
    "stops early and says so": _JOIN
    + """
handle(); run.take_signals()
for step in range(done + 1, total // 2 + 1):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop(): run.leave()
run.mark("end")
""",
    "ends by os._exit": _JOIN
    + """
for step in range(done + 1, total + 1):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop() and step < total: run.leave()
truth.write_text("end")
os._exit(0)
""",
    "refuses at its second start": """
if state.exists():
    print("the output is there already", flush=True)
    sys.exit(0)
keep(0)
for step in range(1, total + 1):
    train(step)
""",
    "refuses at its second start, reports": _JOIN
    + """
if state.exists():
    print("the output is there already", flush=True)
    sys.exit(0)
keep(0)
for step in range(1, total + 1):
    train(step); run.report(step, loss=1.0)
""",
    "ends below what it reports": _JOIN
    + """
for step in range(done + 1, total - 2):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop(): run.leave()
sys.exit(0)
""",
    "ends in its last save": _JOIN
    + """
for step in range(done + 1, total + 1):
    train(step); run.report(step, loss=1.0, max_steps=total); keep(step)
    if run.should_stop() and step < total: run.leave()
with run.save(total) as folder:
    os._exit(0)
""",
}
_NEVER_FINISHED = ("ends below what it reports", "ends in its last save")
"""Programs that come to no end of their own; those that refuse may, at their first start."""
_MAY_BE_EARLY = (*_NEVER_FINISHED, "refuses at its second start", "refuses at its second start, reports")
STOPS = ("nobody", "STOP", "TERM", "USR2", "preemption")
_PREEMPTED = {"JobState": "RUNNING", "PreemptTime": "2026-01-31T09:41:24", "Reason": "None", "Restarts": "0"}


class Trial(NamedTuple):
    """One program and its stops, each with the number of lines after which it comes."""

    number: int
    program: str
    stops: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        stops = ", ".join(f"{stop} after {lines}" for stop, lines in self.stops)
        return f"{self.program}: {stops}"


class _Job(Job):
    """A job that is requeued whenever that is asked for; its record says what the trial says."""

    def __init__(self, restart_count: int) -> None:
        super().__init__({})
        self.job_id = "7"
        self.restart_count = restart_count
        self.is_preempted = False

    def show(self) -> dict[str, str]:
        record = _PREEMPTED | {"Restarts": str(self.restart_count)}
        return record if self.is_preempted else record | {"PreemptTime": "None"}

    def requeue(self, _decision: Decision) -> bool:
        return True

    def wait_for_requeue(self, decision: Decision) -> None:
        """Returns at once."""


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs so many programs, each kind in turn; returns how their attempts ended."""
    dice = random.Random(seed)
    ends = Counter[str]()

    def stop() -> tuple[str, int]:
        return dice.choice(STOPS), dice.randint(3, STEPS)

    names = list(PROGRAMS)
    planned = [Trial(number, names[number % len(names)], (stop(), stop())) for number in range(trials)]
    with (folder / "supervisors.log").open("a") as said, redirect_stderr(said):
        tally.try_all(planned, lambda trial: _problems_of(trial, folder / str(trial.number), ends), at_once=2)
    return {"ends of attempts": ", ".join(f"{reason} {count}" for reason, count in ends.most_common())}


def _problems_of(trial: Trial, folder: Path, ends: Counter[str]) -> list[str]:
    directory = RunDirectory(folder / "runs" / "mine" / "0123456789ab")
    directory.logs.mkdir(parents=True)
    directory.config.write_text(dump_config(RunConfig()))
    program = folder / "train.py"
    program.write_text(_STATE + PROGRAMS[trial.program] + _END)
    truth = directory.path / "truth"
    for attempt in range(_MOST_ATTEMPTS):
        stop, lines = trial.stops[attempt] if attempt < len(trial.stops) else ("nobody", 0)
        reason = _live_once(directory, program, attempt, stop, lines)
        ends[reason] += 1
        if directory.result.exists() and not truth.exists():
            return [f"finished before its end, in attempt {attempt} ({stop})"]
        if reason == "ended_early" and trial.program not in _MAY_BE_EARLY:
            return [f"a good end was called early in attempt {attempt} ({stop})"]
        if directory.result.exists():
            return ["finished in its last save"] if trial.program in _NEVER_FINISHED else []
    return [] if trial.program in _MAY_BE_EARLY else [f"not finished after {_MOST_ATTEMPTS} attempts"]


def _live_once(directory: RunDirectory, program: Path, attempt: int, stop: str, lines: int) -> str:
    """Runs one attempt, which is stopped after so many lines of its log; returns its reason in the ledger."""
    directory.stop_file.unlink(missing_ok=True)
    job = _Job(attempt)

    def launch(number: int) -> int:
        log = directory.rank_log(number, 0)
        argv = [sys.executable, script_main.__file__, str(directory.path), str(program), str(STEPS)]
        with log.open("ab") as output:
            rank = subprocess.Popen(argv, env=_environment(directory, number), stdout=output, stderr=output)
        if stop != "nobody":
            wait_for(
                lambda: rank.poll() is not None or log.read_text().count("step ") >= lines,
                within_s=_PATIENCE_S,
                what=f"{lines} lines of {log}",
            )
        if stop == "STOP":
            directory.stop_file.touch()
        job.is_preempted = stop == "preemption"
        if stop in ("TERM", "USR2", "preemption"):
            rank.send_signal(signal.SIGUSR2 if stop == "USR2" else signal.SIGTERM)
        code = rank.wait(_PATIENCE_S)
        return code if code >= 0 else 128 - code

    step = FunctionStep(launch, job_id="7", restart_count=attempt)
    Supervisor(directory, job, step, RequeueSection(), is_own_code=True).supervise()
    return str(ledger_lines(directory)[-1].get("reason"))


def _environment(directory: RunDirectory, attempt: int) -> dict[str, str]:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    run_variables = {"SLURM_TRAIN_RUN_DIR": str(directory.path), "SLURM_TRAIN_ATTEMPT": str(attempt)}
    return {**os.environ, **ranks, **run_variables, "PYTHONPATH": os.pathsep.join(sys.path)}
