"""Whose a run directory is: its user's alone. Code, script and configuration in it run later, in the user's name.

Folders are made 0700 whatever the umask. A folder or file that somebody else owns or may write is refused rather than
mended where it could have been tampered with already.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from slurm_train.errors import RunError
from slurm_train.rundir.layout import RunDirectory


def make_private(path: Path) -> None:
    """Makes a folder and the missing ones above it, each 0700; one that is there already stays as it is.

    Raises:
        OSError: the file system refuses, or something else is in its place.
    """
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]  # no Path.lexists
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def create_private(path: Path) -> None:
    """Makes an empty file that its user alone may read, or leaves the one that is there; a link is refused."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def require_private(run: RunDirectory) -> None:
    """Does nothing where nobody but this user can have changed what the run will run.

    Looked at are the folders above the run that exist, the run's own, and in it what is run or obeyed. A folder above
    may be writable for others where it is sticky, as /tmp is, or for the user's own group of one.

    Raises:
        RunError: naming the place, its owner and its mode.
    """
    own = [run.path, *_code(run), run.config, run.plan, run.submit_script, run.epochs, run.logs, run.checkpoints]
    for path in (entry for entry in own if os.path.lexists(entry)):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or status.st_uid not in _trusted() or _is_open(status):
            raise _refusal(path, status, "somebody else could have written what would run in your name")
    for path in (run.path.parent, run.path.parent.parent):
        if os.path.lexists(path) and _others_may_replace(status := path.stat()):
            raise _refusal(path, status, "somebody else could put other files in the place of yours")
    for path in run.path.parent.parent.parents:
        if os.path.lexists(path) and (status := path.stat()).st_mode & stat.S_IWOTH and not _is_sticky(status):
            raise _refusal(path, status, "anybody could put other files in the place of yours")


def _code(run: RunDirectory) -> list[Path]:
    """Returns the snapshot; where the runs of a sweep share one by a link, that one and the folders above it.

    Folders in it count where others can enter it at all.
    """
    root = run.path.parent.parent.resolve()
    if not run.code.is_symlink() or run.code.lstat().st_uid not in _trusted():
        return _reachable(run.code)
    shared = run.code.resolve()
    if not shared.is_relative_to(root):
        return [run.code]
    above = (folder for folder in shared.parents if folder.is_relative_to(root) and folder != root)
    return [*_reachable(shared), *above]


def _reachable(code: Path) -> list[Path]:
    if not code.is_dir() or not code.stat().st_mode & 0o011:
        return [code]
    return [Path(folder) for folder, _, _ in os.walk(code)]


def _others_may_replace(status: os.stat_result) -> bool:
    is_foreign = status.st_uid not in _trusted()
    return (is_foreign or _is_open(status)) and not _is_sticky(status)


def _trusted() -> set[int]:
    return {0, os.geteuid()}


def _is_open(status: os.stat_result) -> bool:
    """Says whether others may write; links are always 0777 and mean nothing."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(group_id: int) -> bool:
    """Says whether a group is the user's alone, as many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _is_sticky(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_ISVTX)


def _refusal(path: Path, status: os.stat_result, why: str) -> RunError:
    return RunError(
        f"{path} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}: {why}",
        hint=f"`chmod go-w {path}` if it is yours and you trust its content, else name another place with run.root=DIR",
    )
