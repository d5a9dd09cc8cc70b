"""A second path to a run, where a person wants to find it: a symbolic link, never in the place of something else."""

from __future__ import annotations

import os
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.layout import RunDirectory


def require_free(alias: Path, run: RunDirectory) -> None:
    """Does nothing where the link is there already, or could be made.

    Args:
        alias: the second path, absolute.
        run: where it shall lead; its directory need not exist yet.

    Raises:
        RunError: something else lies there, or it would lie among the runs.
    """
    root = run.path.parent.parent
    if alias.parent.resolve().is_relative_to(root):
        raise RunError(
            f"{alias} lies among the runs, in {root}, whose folders are looked through for runs",
            hint="name a path outside of it, or put all runs elsewhere with run.root=DIR",
        )
    if alias.is_symlink() and alias.resolve() == run.path:
        return
    if os.path.lexists(alias):
        what = f"leads to {alias.resolve()}" if alias.is_symlink() else "is there already"
        raise RunError(
            f"{alias} {what}, and is left alone", hint="name a path where nothing is, or move away what is there"
        )

    # os.path, since Path.exists raises where a folder above may not be entered.
    above = next(folder for folder in alias.parents if os.path.lexists(folder))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        kind = "is not writable" if above.is_dir() else "is not a directory"
        raise RunError(f"{alias} cannot be made: {above} {kind}", hint="name a path that you may write to")


def make_alias(alias: Path, run: RunDirectory) -> None:
    """Makes the link, and the folders above it; does nothing where it is there already.

    Raises:
        RunError: as `require_free`, or nothing can be written there.
    """
    require_free(alias, run)
    try:
        alias.parent.mkdir(parents=True, exist_ok=True)
        if not alias.is_symlink():
            alias.symlink_to(run.path)
    except OSError as err:
        raise RunError(
            f"{alias} cannot be made: {err.strerror or err}", hint="name a path that you may write to"
        ) from err
