"""The one place where folders are removed. No removal goes through a link: of a link, only the link is removed.

Every entry is removed by the descriptor of the folder that it is in, which was opened without following a link. So a
folder that somebody exchanges for a link meanwhile, or has moved elsewhere and left a link to, loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from slurm_train.rundir.files import for_each

_NO_FOLDER = {errno.ENOTDIR, errno.ELOOP}


def remove_tree(path: Path) -> None:
    """Removes a folder and all that is in it, many files at a time; one that is gone is no error.

    Another process may remove the same folder concurrently. What can be removed is removed.

    Raises:
        OSError: the file system refuses to remove something; the first such error.
    """
    with contextlib.suppress(FileNotFoundError):
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _remove(path.name, parent)
        finally:
            os.close(parent)


def _remove(name: str, parent: int) -> None:
    """Removes an entry of an open folder."""
    try:
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as err:
        if err.errno not in _NO_FOLDER:
            raise
        os.unlink(name, dir_fd=parent)
        return
    problems: list[OSError] = []

    def remove_entry(entry: str) -> None:
        try:
            _remove(entry, folder)
        except FileNotFoundError:
            pass
        except OSError as err:
            problems.append(err)

    try:
        for_each(remove_entry, os.listdir(folder))  # noqa: PTH208  # a descriptor
    finally:
        os.close(folder)
    if problems:
        raise problems[0]
    os.rmdir(name, dir_fd=parent)
