"""Campaigns `preflight` and `preflight-healthy`: every fault is caused on the real cluster, and named in one line; runs
on a healthy cluster, of several sizes, with and without measuring, get no line."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.events import read_preflight
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.records import unix_s
from slurm_train.tools.doctor.node_rules import HINTS, OTHER_CODES
from tests.campaigns.preflight_faults import FAULTS, Fault, Scene, missing_for
from tests.campaigns.record import Tally, first_line, only_true
from tests.support.command_line import TINY, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import at_work, command, job_state, wait_until_ended, wait_until_finished
from tests.support.waiting import wait_for

_END_S = 90.0


class Named(NamedTuple):
    """How a fault was named."""

    after_s: float | None
    """From the start of the job to the line, None where there was none; Slurm counts whole seconds."""
    problems: list[str]


def faulty(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Causes each fault, or the first so many of them; the seed changes nothing."""
    named: list[tuple[float, str]] = []
    with at_work(folder) as person:
        for number, fault in enumerate(FAULTS[:trials]):
            what = f"{fault.code}: {fault.what}"
            if lacks := missing_for(fault):
                tally.add(what, [f"not tried: this machine lacks {lacks}"])
                continue
            after_s, problems = try_fault(person, fault, number)
            tally.add(what if after_s is None else f"{what}, after {after_s:.0f} s", problems)
            if after_s is not None and not problems:
                named.append((after_s, fault.code))
    # The first all_reduce fails after a time-out of its own.
    looked = sorted(one for one in named if one[1] != "COLLECTIVE")
    figures = {"codes": str(len({code for _, code in named}))}
    if looked:
        figures["job start to the line, median"] = f"{statistics.median(after_s for after_s, _ in looked):.0f} s"
        figures["at most"] = f"{looked[-1][0]:.0f} s ({looked[-1][1]})"
    for after_s in (after_s for after_s, code in named if code == "COLLECTIVE"):
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
            command("scontrol", "release", job)
            return _watch(person, fault, job, run)
    except AssertionError as err:
        return Named(None, [f"{first_line(err)}; {' | '.join(_log_lines(run)[-4:])}"])
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
        wait_until_ended(run, within_s=_END_S)
    lines = _codes_said(run)
    if len(lines) != 1 or fault.code not in lines[0] or fault.expects not in lines[0]:
        problems.append(f"said {lines}")
    if fault.is_error:
        entry, shown = ledger_lines(run)[-1], person.types("status", str(run.path)).out
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
    lines = _log_lines(run)
    said = (line.removeprefix("slurm_train: ") for line in lines if line.startswith("slurm_train: "))
    found = [line for line in said if line.partition(" ")[0].rstrip(":") in (*HINTS, *OTHER_CODES)]
    # A rank that fails after the preflight says so in the attempt's note alone.
    return found or [line for line in lines if "COLLECTIVE" in line]


def _log_lines(run: RunDirectory) -> list[str]:
    log = run.logs / "batch.log"
    return log.read_text(errors="replace").splitlines() if log.exists() else []


_SIZES = ("2x2", "4x2", "1x4", "3x1", "4x8")
_PATIENCE_S = 300.0


def healthy(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs so many trials; every fourth run measures speeds, too. Returns how long rank 0 looked at most, by size."""
    looked: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with at_work(folder) as person:
        for number in range(trials):
            size, measures = _SIZES[(number + seed) % len(_SIZES)], number % 4 == 3
            what = f"{size}{' with measuring' if measures else ''}"
            with tally.trial(what) as problems:
                run = _train(person, number, size, measures=measures)
                record = read_preflight(run, 0)
                problems += problems_of(run, record)
                took_s, waited_s = (float(record.get(name, 0.0)) for name in ("seconds", "waited_s"))
                looked[what].append((took_s, took_s - waited_s))
    columns = ((what, *zip(*times, strict=True)) for what, times in sorted(looked.items()))
    shown = (f"{what} {max(took):.2f} s ({max(alone):.2f} s)" for what, took, alone in columns)
    return {"longest look (after the last rank came)": ", ".join(shown)}


def _train(person: Person, number: int, size: str, *, measures: bool) -> RunDirectory:
    words = (*TINY, "train.threads=1", "batch.global_size=96", f"run.name=healthy-{number}")
    # The training behind it shows that a healthy job is not kept from it; 32 ranks would import torch for a minute.
    short = ("preflight.only=true",) if size == "4x8" else ("train.max_steps=2",)
    speeds = f"preflight.bandwidth={str(measures).lower()}"
    _, run = person.types(f"+cluster={size}", *words, *short, speeds).job_and_run
    wait_until_finished(run, within_s=_PATIENCE_S)
    return run


def problems_of(run: RunDirectory, record: dict[str, object]) -> list[str]:
    """Returns what speaks against a healthy run."""
    findings, attempts = record.get("findings"), len(ledger_lines(run))
    return only_true(
        {"nobody looked": not record, f"false alarm: {findings}": findings, f"{attempts} attempts": attempts != 1}
    )
