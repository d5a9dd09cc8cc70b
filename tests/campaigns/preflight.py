"""Campaigns `preflight` and `preflight-healthy`: every fault is caused on the real cluster, and named in one line; runs
on a healthy cluster, of several sizes, with and without measuring, get no line."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.events import read_preflight
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import unix_s
from slurm_train.tools.doctor.node_rules import HINTS, OTHER_CODES
from tests.campaigns.preflight_faults import FAULTS, Fault, Scene, missing_for
from tests.campaigns.record import Result, Tally, Trial
from tests.campaigns.victims import at_work
from tests.support.command_line import TINY, Person
from tests.support.slurm_runs import job_state, wait_until_finished
from tests.support.waiting import wait_for

_END_S = 90.0


class Named(NamedTuple):
    """How a fault was named."""

    after_s: float | None
    """From the start of the job to the line, None where there was none; Slurm counts whole seconds."""
    problems: list[str]


def faulty(*, seed: int, trials: int, folder: Path) -> Result:
    """Causes each fault, or the first so many of them; the seed changes nothing."""
    del seed
    made, tally = list[Trial](), Tally()
    with at_work(folder) as person:
        for number, fault in enumerate(FAULTS[:trials]):
            made.append(_with_fault(person, fault, number))
            tally.add(made[-1].what, made[-1].problems)
    return tally.result(_figures_of_faults(made))


def _with_fault(person: Person, fault: Fault, number: int) -> Trial:
    what = f"{fault.code}: {fault.what}"
    if lacks := missing_for(fault):
        return Trial(what, (f"not tried: this machine lacks {lacks}",))
    named = try_fault(person, fault, number)
    seconds = {} if named.after_s is None or named.problems else {fault.code: named.after_s}
    said = what if named.after_s is None else f"{what}, after {named.after_s:.0f} s"
    return Trial(said, tuple(named.problems), seconds)


def _figures_of_faults(trials: Sequence[Trial]) -> dict[str, str]:
    """Returns how many codes were seen and how soon; the first all_reduce fails after a time-out of its own."""
    times = sorted((after_s, code) for trial in trials for code, after_s in trial.seconds.items())
    looked = [time for time in times if time[1] != "COLLECTIVE"]
    figures = {"codes": str(len({code for _, code in times}))}
    if looked:
        after_s, code = looked[-1]
        half_s = statistics.median(seconds for seconds, _ in looked)
        figures["job start to the line, median"] = f"{half_s:.0f} s"
        figures["at most"] = f"{after_s:.0f} s ({code})"
    for after_s in (seconds for seconds, code in times if code == "COLLECTIVE"):
        figures["to COLLECTIVE, with a time-out of 8 s"] = f"{after_s:.0f} s"
    return figures


def try_fault(person: Person, fault: Fault, number: int) -> Named:
    """Causes one fault and reads what is said about it."""
    scratch = person.folder.parent / f"scratch_{number}"
    scratch.mkdir()
    name = f"{fault.code.lower().replace('_', '-')}-{number}"
    words = (*TINY, "train.threads=1", "batch.global_size=24", f"run.name={name}", "requeue.enabled=false")
    only = () if fault.trains else ("preflight.only=true",)
    size = (
        f"+cluster={fault.nodes}x{fault.per_node}",
        f"cluster.nodelist=node[1-{fault.nodes}]",
        "cluster.sbatch.hold=true",
    )
    job, run = person.types(*size, *words, *only, *fault.words, *fault.prepared(scratch)).job_and_run
    try:
        with fault.cause(Scene(run, scratch)):
            subprocess.run(["scontrol", "release", job], check=True)
            return _watch(person, fault, job, run)
    except AssertionError as err:
        return Named(None, [f"{str(err).partition(chr(10))[0]}; {_said(run)}"])
    finally:
        person.runs("scancel", "--quiet", job)
        wait_for(
            lambda: job_state(job) not in ("RUNNING", "COMPLETING", "PENDING"), within_s=60, what="the end of the job"
        )


def _watch(person: Person, fault: Fault, job: str, run: RunDirectory) -> Named:
    wait_for(lambda: _codes_said(run), within_s=fault.within_s + 15, what=f"a line about {fault.code}", poll_s=0.1)
    seen_unix_s = time.time()
    problems = []
    after_s = seen_unix_s - _start_of(job)
    # Slurm rounds the start down to a second.
    if after_s > fault.within_s + 1.0:
        problems.append(f"named after {after_s:.1f} s")
    if fault.code != "NODE_MISSING":
        wait_for(lambda: "reason" in (read_ledger(run) or [{}])[-1], within_s=_END_S, what="the end of the attempt")
    lines = _codes_said(run)
    if len(lines) != 1 or fault.code not in lines[0] or fault.expects not in lines[0]:
        problems.append(f"said {lines}")
    if fault.is_error:
        entry, shown = read_ledger(run)[-1], person.types("status", run.run_id).out
        if (entry.get("reason"), entry.get("action")) != ("failed", "stop"):
            problems.append(f"the ledger says {entry.get('reason')}, {entry.get('action')}: {entry.get('note')}")
        if fault.code not in str(entry.get("note")) or fault.code not in shown:
            problems.append(f"the note is {entry.get('note')!r}, status shows {shown!r}")
    elif fault.code != "NODE_MISSING" and not run.result.exists():
        problems.append("a warning kept the run from its end")
    return Named(after_s, problems)


def _start_of(job: str) -> float:
    started_unix_s = unix_s(SlurmCommands(os.environ).show_job(job)["StartTime"])
    assert started_unix_s is not None
    return started_unix_s


def _codes_said(run: RunDirectory) -> list[str]:
    """Returns the lines of the batch log that begin with a code."""
    log = run.logs / "batch.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    said = (line.removeprefix("slurm_train: ") for line in lines if line.startswith("slurm_train: "))
    found = [line for line in said if line.partition(" ")[0].rstrip(":") in (*HINTS, *OTHER_CODES)]
    # A rank that fails after the preflight says so in the attempt's note alone.
    return found or [line for line in lines if "COLLECTIVE" in line]


def _said(run: RunDirectory) -> str:
    log = run.logs / "batch.log"
    return " | ".join(log.read_text(errors="replace").splitlines()[-4:]) if log.exists() else "nothing"


_SIZES = ("2x2", "4x2", "1x4", "3x1", "4x8")
_PATIENCE_S = 300.0


def healthy(*, seed: int, trials: int, folder: Path) -> Result:
    """Runs so many trials; every fourth run measures speeds, too."""
    made, tally = list[Trial](), Tally()
    with at_work(folder) as person:
        for number in range(trials):
            made.append(_healthy(person, number, size=_SIZES[(number + seed) % len(_SIZES)]))
            tally.add(made[-1].what, made[-1].problems)
    return tally.result(_figures_of_healthy(made))


def _healthy(person: Person, number: int, *, size: str) -> Trial:
    measures = number % 4 == 3
    words = (*TINY, "train.threads=1", "batch.global_size=96", f"run.name=healthy-{number}")
    # The training behind it shows that a healthy job is not kept from it; 32 ranks would import torch for a minute.
    short = ("preflight.only=true",) if size == "4x8" else ("train.max_steps=2",)
    speeds = f"preflight.bandwidth={str(measures).lower()}"
    what = f"{size}{' with measuring' if measures else ''}"
    _, run = person.types(f"+cluster={size}", *words, *short, speeds).job_and_run
    try:
        wait_until_finished(run, within_s=_PATIENCE_S)
    except AssertionError as err:
        return Trial(what, (str(err).partition("\n")[0],))
    record = read_preflight(run, 0)
    took_s, waited_s = (float(record.get(name, 0.0)) for name in ("seconds", "waited_s"))
    problems = tuple(problems_of(run, record))
    said = f"{what}, looked for {took_s:.2f} s, {waited_s:.2f} s of them until the last rank had come"
    return Trial(said, problems, {what: took_s, f"{what} alone": took_s - waited_s})


def _figures_of_healthy(trials: Sequence[Trial]) -> dict[str, str]:
    """Returns how long rank 0 looked at most, by size, with and without its wait for the last rank."""
    longest: dict[str, float] = {}
    for trial in trials:
        for what, took_s in trial.seconds.items():
            longest[what] = max(took_s, longest.get(what, 0.0))
    sizes = sorted(what for what in longest if not what.endswith(" alone"))
    shown = (f"{what} {longest[what]:.2f} s ({longest[f'{what} alone']:.2f} s)" for what in sizes)
    return {"longest look (after the last rank came)": ", ".join(shown)}


def problems_of(run: RunDirectory, record: dict[str, object]) -> list[str]:
    """Returns what speaks against a healthy run."""
    problems = [] if record else ["nobody looked"]
    if findings := record.get("findings"):
        problems.append(f"false alarm: {findings}")
    if len(read_ledger(run)) != 1:
        problems.append(f"{len(read_ledger(run))} attempts")
    return problems
