"""Writes a run directory: frozen configuration, plan, script, code snapshot.

Called when nothing is left to refuse. Each file is replaced as one step, so a run that is submitted again at another
size is never half old and half new to a reader.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import RunError
from slurm_train.launch.code_index import seal_code
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import SourceState, plan_snapshot, write_snapshot
from slurm_train.rundir.changes import AcceptedChange, record_change
from slurm_train.rundir.files import fsync_directory, fsync_file, read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory


@dataclass(frozen=True, slots=True)
class Source:
    """The submitting directory and the files of it that belong to the code."""

    directory: Path
    state: SourceState
    files: Sequence[str]


def read_source(plan: RunPlan, directory: Path, state: SourceState) -> Source:
    """Returns what would be copied from the submitting directory; touches nothing.

    Outside git, and with none of your own code named, there is nothing that a job would need from there.

    Raises:
        ConfigError: more than a code snapshot may be.
    """
    if state.files is None and not uses_own_code(plan):
        return Source(directory, state, ())
    root = plan.run.path.parent.parent
    # Where the runs' root holds the code as well (run.root=.), only this run's own folder is left out.
    runs = plan.run.path.parent if directory.resolve().is_relative_to(root) else root
    files = plan_snapshot(directory, state, limit_mb=plan.config.run.snapshot_limit_mb, exclude=runs)
    return Source(directory, state, files)


def uses_own_code(plan: RunPlan) -> bool:
    """Returns whether the run names code that does not ship with this package."""
    return names_own_code(plan.config)


def names_own_code(config: RunConfig) -> bool:
    """Returns whether a configuration names code that does not ship with this package."""
    targets = [str(part.get("_target_", "")) for part in (config.model, config.data, config.task) if part]
    return config.script is not None or any(not target.startswith("slurm_train.") for target in targets)


def require_writable(run: RunDirectory) -> None:
    """Refuses a run directory that could not be written.

    Raises:
        RunError: the nearest existing folder above it is not writable, or is not a folder.
    """
    # os.path, since Path.exists raises where a folder above may not be entered.
    existing = next(path for path in (run.path, *run.path.parents) if os.path.exists(path))  # noqa: PTH110
    is_folder = existing.is_dir()
    if not is_folder or not os.access(existing, os.W_OK | os.X_OK):
        kind = "is not writable" if is_folder else "is not a directory"
        raise RunError(f"{run.path} cannot be made: {existing} {kind}", hint="name another place with run.root=DIR")


def write_run_directory(
    plan: RunPlan, source: Source | None, *, script: str | None, change: AcceptedChange | None = None
) -> None:
    """Writes everything that the job reads.

    Args:
        plan: the run.
        source: the code to copy; None leaves the snapshot as it is.
        script: text of submit.sh, None for a local run.
        change: what was accepted in the middle of the run; put on record first, and what it replaces is kept.
    """
    run, durable = plan.run, change is not None
    _make_folders(run)
    if change is not None:
        _keep_what_was(run, change)
        record_change(run, change)
    if source is not None:
        keep = run.before_change(change.number) / "code" if change is not None and change.code else None
        write_snapshot(source.directory, source.files, run.code, keep=keep)
        seal_code(run, source.files)
    write_atomic(run.config, dump_config(plan.config), durable=durable)
    write_atomic(run.plan, json.dumps(plan.as_json(), indent=2) + "\n", durable=durable)
    if script is not None:
        write_atomic(run.submit_script, script, durable=durable, mode=0o700)
    run.stop_file.unlink(missing_ok=True)


def _keep_what_was(run: RunDirectory, change: AcceptedChange) -> None:
    folder = run.before_change(change.number)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (run.config, run.plan, run.provenance, run.code_index, run.submit_script):
        if path.exists():
            shutil.copy2(path, folder / path.name)
            fsync_file(folder / path.name)
    if run.result.exists():
        run.result.rename(folder / run.result.name)
    for place in (folder, folder.parent, run.path):
        fsync_directory(place)


def _make_folders(run: RunDirectory) -> None:
    try:
        for folder in (run.path, run.logs, run.checkpoints):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as err:
        hint = "name another place with run.root=DIR"
        raise RunError(f"{run.path} cannot be made: {err.strerror or err}", hint=hint) from err


def record_job(run: RunDirectory, job_id: str, *, continues: str | None = None) -> None:
    """Adds a job id to `job.json`; the newest is last.

    Args:
        run: the run.
        job_id: the job.
        continues: the job that it takes over from; such a job does not start if that one was cancelled.
    """
    known = read_json(run.job) or {}
    followers = {**known.get("continues", {}), **({job_id: continues} if continues else {})}
    record = {"job_ids": [*known.get("job_ids", []), job_id], "submit_time_unix_s": time.time()}
    write_atomic(run.job, json.dumps({**record, "continues": followers} if followers else record) + "\n")


def continued_job(run: RunDirectory, job_id: str) -> str | None:
    """Returns the job that `job_id` takes over from, None where it stands for itself."""
    found = (read_json(run.job) or {}).get("continues", {}).get(job_id)
    return None if found is None else str(found)
