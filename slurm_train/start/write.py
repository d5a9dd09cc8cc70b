"""Writes run directories and sweeps: frozen configuration, plan, script, copy of the code, table.

Called after all checks. Each file is replaced atomically, so when a run is submitted again with another size, no reader
sees a partly written file.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.code.snapshot import Source, link_file, share_snapshot, write_snapshot
from slurm_train.config.frozen import dump_config
from slurm_train.errors import RunError
from slurm_train.plan.plan import RunPlan, SweepPlan
from slurm_train.rundir.attempts import withdraw_result
from slurm_train.rundir.events import AcceptedChange, record_change
from slurm_train.rundir.files import (
    create_empty,
    fsync_directory,
    fsync_file,
    is_shared,
    make_folder,
    make_private,
    share_folder,
    write_atomic,
)
from slurm_train.rundir.jobs import read_job, write_request
from slurm_train.rundir.lookup import require_writable_folder
from slurm_train.rundir.paths import Placed, RunDirectory, require_private
from slurm_train.rundir.sweep import Element, SweepDirectory, read_table, write_table
from slurm_train.rundir.trial import require_calls
from slurm_train.slurm.job_request import JobRequest


def require_writable(run: RunDirectory, *, share: str = "private", is_sweep: bool = False) -> None:
    """Refuses a run directory that cannot be written, or that other users could change.

    Args:
        run: the run, or a sweep.
        share: as `run.share`.
        is_sweep: whether it is a sweep, whose runs share their code by links.

    Raises:
        RunError: the nearest existing folder above it is not writable, or is not a folder, or its file system lacks a
            call; see also `require_private` and `_require_shareable`.
    """
    folder = require_writable_folder(run.path, hint="name another place with run.root=DIR")
    require_private(run)
    require_calls(folder, symlinks=is_sweep)
    if share == "group":
        _require_shareable(run.root)


def _require_shareable(root: Path) -> None:
    """Refuses `run.share=group` if the group could not enter the root, or is not a group of this user.

    Raises:
        RunError: the root, or the folder in which it will be created, is not prepared for a group of this user.
    """
    nearest = next(parent for parent in (root, *root.parents) if parent.exists())
    status = nearest.stat()
    is_own_group = status.st_gid in (os.getegid(), *os.getgroups()) or os.geteuid() == 0
    if status.st_mode & 0o2050 != 0o2050 or not is_own_group:
        raise RunError(
            f"run.share=group: {nearest} (mode {stat.filemode(status.st_mode)}, gid {status.st_gid}) is not set up for "
            "a group of yours: its group must be able to read and enter it, and what is made in it must get its group",
            hint=f"chgrp GROUP {nearest}; chmod g+rxs {nearest}",
        )


def _share(folder: Path) -> None:
    """Shares the folder of a run or sweep with the group, and the folders of this user above it up to the root."""
    for place in (Placed(folder).place, folder.parent, folder):
        if not is_shared(place) and place.stat().st_uid == os.geteuid() and not place.stat().st_mode & stat.S_IRGRP:
            os.chown(place, -1, place.parent.stat().st_gid)
            share_folder(place)


def write_run(
    plan: RunPlan,
    code: Source | RunDirectory | Path | None,
    *,
    request: JobRequest | None,
    change: AcceptedChange | None = None,
) -> list[str]:
    """Writes all files that the job reads.

    Args:
        plan: the run.
        code: the code to copy, or a snapshot of a sweep or of another run to share; None: the existing snapshot.
        request: what its job asks for, None for a local run.
        change: an accepted change in the middle of the run; it is recorded first, and the replaced files are kept.

    Returns:
        The new names of files in the copy of the code that a program may have written, and that had to be renamed.
    """
    run = plan.run
    try:
        make_private(run.path)
        if plan.config.run.share == "group":
            _share(run.path)
        for folder in (run.logs, run.checkpoints):
            make_folder(folder, within=run.path)
        # Slurm would create it with the umask of the login shell.
        create_empty(run.logs / "batch.log")
    except OSError as err:
        hint = "name another place with run.root=DIR"
        raise RunError(f"{run.path} cannot be made: {err.strerror or err}", hint=hint) from err
    if change is not None:
        put_on_record(run, change)
    set_aside: list[str] = []
    if isinstance(code, Source):
        keep = run.before_change(change.number) / "code" if change is not None and change.code else None
        set_aside = write_snapshot(code, run.code, index=run.code_index, keep=keep)
    elif code is not None:
        set_aside = link_code(run, code, change=change)
    durable = change is not None
    write_atomic(run.config, dump_config(plan.config), durable=durable)
    write_atomic(run.plan, json.dumps(plan.record.as_json(), indent=2) + "\n", durable=durable)
    if request is not None:
        write_request(run.submit_script, request, durable=durable)
    run.stop_file.unlink(missing_ok=True)
    return set_aside


def put_on_record(run: RunDirectory, change: AcceptedChange) -> None:
    """Keeps the files that an accepted change will replace, and records the change; durable when this returns."""
    folder = run.before_change(change.number)
    make_folder(folder, within=run.path)
    for path in (run.config, run.plan, run.provenance, run.code_index, run.submit_script, run.request):
        if path.exists():
            shutil.copy2(path, folder / path.name)
            fsync_file(folder / path.name)
    if run.code.is_symlink():
        link_file(folder / run.code.name, run.code.resolve())
    withdraw_result(run, folder / run.result.name)
    for place in (folder, folder.parent, run.path):
        fsync_directory(place)
    record_change(run, change)


# --- what the runs of a sweep share ---


def write_table_of(plan: SweepPlan, *, words: Sequence[str]) -> list[Element]:
    """Writes a sweep's table and its command line; returns the planned runs as they are in the table.

    A run that is in the table keeps its number, and stays in the table if this batch of a sweeper has other runs.
    """
    sweep = plan.sweep
    if plan.plans[0].config.run.share == "group":
        _share(sweep.path)
    table = {element.run: element for element in read_table(sweep)}
    for element in plan.elements:
        record = read_job(element.run)
        existing = table.get(element.run)
        index = len(table) if existing is None else existing.index
        table[element.run] = replace(element, index=index, job=None if record is None else record.job_id)
    write_table(sweep, table.values())
    facts = {"words": list(words), "time_unix_s": time.time()}
    write_atomic(sweep.facts, json.dumps(facts, indent=2) + "\n")
    sweep.stop_file.unlink(missing_ok=True)
    return [table[element.run] for element in plan.elements]


def write_shared_code(sweep: SweepDirectory, source: Source) -> Path:
    """Copies the code once for the runs of a submission and returns the snapshot.

    Next to it lie `<number>.files.json`, its hashes, and `<number>.json`, its provenance.
    """
    make_folder(sweep.code, within=sweep.path)
    taken = [int(path.name) for path in sweep.code.iterdir() if path.name.isdigit()]
    code = sweep.code / f"{max(taken, default=-1) + 1:03d}"
    write_snapshot(source, code, index=code.with_suffix(".files.json"))
    return code


def link_code(run: RunDirectory, code: Path | RunDirectory, *, change: AcceptedChange | None = None) -> list[str]:
    """Links a run to a shared snapshot, or to that of another run.

    Args:
        run: the run.
        code: the snapshot, or the other run.
        change: as for `write_run`, which says what is returned.
    """
    if isinstance(code, RunDirectory):
        shared, index, provenance = (code.code, code.code_index, code.provenance)
    else:
        shared, index, provenance = (code, code.with_suffix(".files.json"), code.with_suffix(".json"))
    keep = run.before_change(change.number) / "code" if change is not None and change.code else None
    set_aside = share_snapshot(run, shared, index, keep=keep)
    link_file(run.provenance, provenance)
    return set_aside
