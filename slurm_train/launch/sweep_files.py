"""Writes a sweep: its table, one snapshot of the code for all, and the directories of the runs to be carried out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from slurm_train.launch.preparation import SharedCode, write_shared_code, write_sweep_run
from slurm_train.launch.source import Source
from slurm_train.launch.sweep import SweepPlan
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.layout import RunDirectory, list_checkpoints
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table, write_table


def write_sweep(
    plan: SweepPlan,
    source: Source,
    scripts: Mapping[RunDirectory, str | None],
    *,
    words: Sequence[str],
    holding: Callable[[RunDirectory], AbstractContextManager[None]],
) -> SharedCode | None:
    """Writes the table, one snapshot of the code, and the directories of the runs that are to be carried out.

    Returns the snapshot, whose provenance is still to be written; None where nothing is to be carried out.

    Args:
        plan: the sweep.
        source: the code to copy.
        scripts: those runs with the text of their submit.sh, None on this machine.
        words: the command line.
        holding: keeps others from running a run while it is written.
    """
    sweep = plan.sweep
    known = {element.run: element for element in read_table(sweep)}
    elements = [_merged(element, known.get(element.run)) for element in plan.elements]
    write_table(sweep, sorted(elements, key=lambda element: element.index))
    facts = {"words": list(words), "keys": plan.keys, "time_unix_s": time.time()}
    write_atomic(sweep.facts, json.dumps(facts, indent=2) + "\n")
    sweep.stop_file.unlink(missing_ok=True)
    if not scripts:
        return None
    code = next_code(sweep)
    write_shared_code(source, code)
    for one in plan.plans:
        if one.run in scripts:
            # Nobody runs what has never been written, and there may be thousands of those.
            with holding(one.run) if one.run.config.exists() else nullcontext():
                # A run that has been trained goes on with its own code; `resume --accept code` gives it another.
                write_sweep_run(one, code=None if _is_trained(one.run) else code, script=scripts[one.run])
    return code


def _is_trained(run: RunDirectory) -> bool:
    return run.code.exists() and bool(list_checkpoints(run.checkpoints))


def _merged(element: Element, known: Element | None) -> Element:
    """Returns an element with the index that an older table gives to its run, and the newest job that the run had."""
    record = read_job(element.run)
    return replace(
        element,
        index=element.index if known is None else known.index,
        job=None if record is None else record.job_id,
    )


def next_code(sweep: SweepDirectory) -> SharedCode:
    """Returns the folder for the next snapshot of a sweep."""
    sweep.code.mkdir(mode=0o700, exist_ok=True)
    taken = [int(path.name) for path in sweep.code.iterdir() if path.name.isdigit()]
    return SharedCode(sweep.code / f"{max(taken, default=-1) + 1:03d}")
