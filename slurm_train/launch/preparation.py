"""Writes a run directory: frozen configuration, plan, script, code snapshot.

Called when nothing is left to refuse. Each file is replaced as one step, so a run that is submitted again at another
size is never half old and half new to a reader.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from slurm_train.config.frozen import dump_config
from slurm_train.errors import RunError
from slurm_train.launch.code_index import seal_code
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.snapshot import link_snapshot, write_snapshot
from slurm_train.launch.source import Source
from slurm_train.rundir.attempts import withdraw_result
from slurm_train.rundir.events import AcceptedChange, record_change
from slurm_train.rundir.files import create_private, fsync_directory, fsync_file, make_private, write_atomic
from slurm_train.rundir.layout import RunDirectory, require_private


def require_writable(run: RunDirectory) -> None:
    """Refuses a run directory that could not be written, or that others could change.

    Raises:
        RunError: the nearest existing folder above it is not writable, or is not a folder; see also `require_private`.
    """
    # os.path, since Path.exists raises where a folder above may not be entered.
    existing = next(path for path in (run.path, *run.path.parents) if os.path.exists(path))  # noqa: PTH110
    is_folder = existing.is_dir()
    if not is_folder or not os.access(existing, os.W_OK | os.X_OK):
        kind = "is not writable" if is_folder else "is not a directory"
        raise RunError(f"{run.path} cannot be made: {existing} {kind}", hint="name another place with run.root=DIR")
    require_private(run)


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
    run = plan.run
    _make_folders(run)
    if change is not None:
        put_on_record(run, change)
    if source is not None:
        keep = run.before_change(change.number) / "code" if change is not None and change.code else None
        write_snapshot(source.directory, source.files, run.code, others=source.others, keep=keep)
        seal_code(run.code, source.names, record=run.code_index, facts=source.as_record())
    _write_files(plan, script, durable=change is not None)


@dataclass(frozen=True, slots=True)
class SharedCode:
    """A snapshot that the runs of a submission share; it lies below the same root as they do."""

    path: Path

    @property
    def provenance(self) -> Path:
        """Where it came from."""
        return self.path.with_suffix(".json")

    @property
    def index(self) -> Path:
        """Hashes of its files."""
        return self.path.with_suffix(".files.json")


def write_shared_code(source: Source, code: SharedCode) -> None:
    """Copies the code once for many runs."""
    write_snapshot(source.directory, source.files, code.path, others=source.others)
    seal_code(code.path, source.names, record=code.index, facts=source.as_record())


def link_code(run: RunDirectory, code: SharedCode) -> None:
    """Has a run use a shared snapshot from now on."""
    link_snapshot(run.code, code.path)
    link_snapshot(run.code_index, code.index)
    link_snapshot(run.provenance, code.provenance)


def write_sweep_run(plan: RunPlan, *, code: SharedCode | None, script: str | None) -> None:
    """Writes everything that the job of one run of a sweep reads.

    Args:
        plan: the run.
        code: the snapshot; None leaves the run the one that it has.
        script: text of submit.sh, None for a local run.
    """
    _make_folders(plan.run)
    if code is not None:
        link_code(plan.run, code)
    _write_files(plan, script, durable=False)


def _write_files(plan: RunPlan, script: str | None, *, durable: bool) -> None:
    run = plan.run
    write_atomic(run.config, dump_config(plan.config), durable=durable)
    write_atomic(run.plan, json.dumps(plan.as_json(), indent=2) + "\n", durable=durable)
    if script is not None:
        write_atomic(run.submit_script, script, durable=durable, mode=0o700)
    run.stop_file.unlink(missing_ok=True)


def put_on_record(run: RunDirectory, change: AcceptedChange) -> None:
    """Keeps what an accepted change is about to replace, and writes the change down; durable when this returns."""
    _keep_what_was(run, change)
    record_change(run, change)


def _keep_what_was(run: RunDirectory, change: AcceptedChange) -> None:
    folder = run.before_change(change.number)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (run.config, run.plan, run.provenance, run.code_index, run.submit_script):
        if path.exists():
            shutil.copy2(path, folder / path.name)
            fsync_file(folder / path.name)
    if run.code.is_symlink():
        link_snapshot(folder / run.code.name, run.code.resolve())
    withdraw_result(run, folder / run.result.name)
    for place in (folder, folder.parent, run.path):
        fsync_directory(place)


def _make_folders(run: RunDirectory) -> None:
    try:
        for folder in (run.path, run.logs, run.checkpoints):
            make_private(folder)
        # Slurm would make it by the umask of the login shell.
        create_private(run.logs / "batch.log")
    except OSError as err:
        hint = "name another place with run.root=DIR"
        raise RunError(f"{run.path} cannot be made: {err.strerror or err}", hint=hint) from err
