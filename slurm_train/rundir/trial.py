"""A trial of the calls that a run needs of its file system, before anything is written or submitted.

Network file systems, FUSE and cloud storage may lack a call, e.g. hard links or changes of the mode. A run needs them
in the job, after hours in the queue. Not tried: fsync of a folder, which is passed over where it does not exist (see
`files.fsync_directory`), and locks of `flock`, which are a help only.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.files import link, rename, write_durable
from slurm_train.rundir.removal import remove_tree


def require_calls(folder: Path, *, symlinks: bool = False) -> None:
    """Tries in a folder what a run needs of its file system; leaves nothing behind.

    Args:
        folder: it is there, and may be written to.
        symlinks: whether symbolic links are needed, as by the runs of a sweep, which share their code.

    Raises:
        RunError: a call is refused; with its name, and what the file system says.
    """
    place = folder / f".trial.{socket.gethostname()}.{os.getpid()}"
    moved = place.with_suffix(".moved")
    first = place / "first"
    second = place / "second"
    # pathlib of Python 3.10 keeps calls of its own, which a test could not refuse.
    calls: dict[str, Callable[[], object]] = {
        "does not make a folder": lambda: place.mkdir(mode=0o700),
        "does not write a file to its disk (fsync)": lambda: write_durable(first, "1\n"),
        "makes no hard links, and a lock is one": lambda: link(first, second),
        "does not replace a file by a renamed one": lambda: rename(first, second),
        "does not change modes, and the copy of the code is read-only": lambda: os.chmod(second, 0o400),  # noqa: PTH101
        "does not rename a folder": lambda: rename(place, moved),
    }
    if symlinks:
        calls["makes no symbolic links, and runs share code by them"] = lambda: os.symlink(moved, place)  # noqa: PTH211
    try:
        for what, call in calls.items():
            _try(call, what, folder)
    finally:
        for left in (place, moved):
            with contextlib.suppress(OSError):
                remove_tree(left)


def _try(call: Callable[[], object], what: str, folder: Path) -> None:
    try:
        call()
    except OSError as err:
        raise RunError(
            f"{folder} cannot hold runs: its file system {what}: {err.strerror or err}",
            hint="name a place on another file system with run.root=DIR",
        ) from err
