"""Whose files and folders a command believes: those of this user and of root, and of a run what its owner says of it.

Other users make files as well below a root of runs that several share, and in the folders above it. A file of theirs in
a folder that is not theirs counts as absent, whatever its name. What is no plain file (a named pipe would keep the
reader waiting) counts as absent, too. On the way to a folder, no other user may be able to lead elsewhere.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Collection
from pathlib import Path

from slurm_train.errors import RunError

_FIRST_PERSON = 1000
"""Smaller uids are those of the system (UID_MIN of login.defs), so of the site."""
_LARGEST_OF_OTHERS = 1 << 28
"""Bytes; a file without end must not fill the memory of whoever looks at the runs of others."""
_MOST_LINKS = 40
"""As many as the kernel follows."""


def trusted_owners() -> set[int]:
    """Returns the uids of those whose files may steer this user's runs: root, and this user."""
    return {0, os.geteuid()}


def owner_id(path: Path) -> int | None:
    """Returns the uid of who has made a file, folder or link, None where it is not there or may not be seen."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def is_own_folder(path: Path) -> bool:
    """Returns whether a path is a folder, no link, that this user or root owns."""
    return owner_id(path) in trusted_owners() and path.is_dir() and not path.is_symlink()


def open_plain(path: Path) -> int:
    """Opens a file to be read, and returns its descriptor; a link in its place is refused.

    Raises:
        FileNotFoundError: there is no plain file of somebody whose word counts.
        OSError: it is a link, or cannot be read.
    """
    return _open(path, os.O_NOFOLLOW, writers=None)


def open_to_read(path: Path, *, writers: Collection[int] | None = None) -> int:
    """Opens a file below a root of runs, and returns its descriptor; a link counts if one user owns it and the file.

    Args:
        path: the file.
        writers: uids whose file counts; None: this user, root, and the owner of the folder that the file is in.

    Raises:
        FileNotFoundError: there is no plain file of somebody whose word counts.
        OSError: it cannot be read.
    """
    try:
        return _open(path, os.O_NOFOLLOW, writers=writers)
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise
    link_owner = path.lstat().st_uid
    if not _counts(path, link_owner, writers):
        raise _absent(path)
    return _open(path, 0, writers={0, link_owner})


def read_bytes(path: Path, *, writers: Collection[int] | None = None) -> bytes:
    """Returns the content of a file, see `open_to_read`."""
    with open(open_to_read(path, writers=writers), "rb", buffering=0) as file:  # a descriptor
        return file.readall()


def read_text(path: Path, *, writers: Collection[int] | None = None, errors: str = "strict") -> str:
    """Returns the text of a file, see `open_to_read`."""
    return read_bytes(path, writers=writers).decode(errors=errors)


def _open(path: Path, flags: int, *, writers: Collection[int] | None) -> int:
    try:
        # Without O_NONBLOCK, opening a named pipe waits for somebody who writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except PermissionError:
        if path.parent.stat().st_uid in trusted_owners():
            raise
        raise _absent(path) from None
    status = os.fstat(descriptor)
    is_others = status.st_uid not in trusted_owners()
    is_too_large = is_others and status.st_size > _LARGEST_OF_OTHERS
    if not stat.S_ISREG(status.st_mode) or is_too_large or not _counts(path, status.st_uid, writers):
        os.close(descriptor)
        raise _absent(path)
    return descriptor


def _counts(path: Path, owner: int, writers: Collection[int] | None) -> bool:
    if writers is not None:
        return owner in writers
    return owner in trusted_owners() or owner == path.parent.stat().st_uid


def _absent(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


# --- the way to a folder ---


def enter_folder(path: Path) -> int:
    """Opens a folder, and returns its descriptor, if no other user can lead the way to it elsewhere.

    Each folder and link on the way is looked at as it is opened, those behind links as well. A link must be this user's
    or root's. A folder may also be the system's (a uid below 1000), or that of somebody who has set it up for a group
    of this user; root may go through everybody's. Anybody may write to it only where it is sticky, as /tmp is.

    Args:
        path: absolute.

    Raises:
        RunError: naming the place, its owner and its mode.
        OSError: it is not there, or is no folder.
    """
    descriptor = _open_folder("/")
    place = Path("/")
    waiting = list(reversed(path.parts[1:]))
    num_links = 0
    try:
        while waiting:
            name = waiting.pop()
            status = os.lstat(name, dir_fd=descriptor)
            if stat.S_ISLNK(status.st_mode):
                _check_link(place / name, status)
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                target = Path(os.readlink(name, dir_fd=descriptor))
                waiting += reversed(target.parts)
                continue
            following = _open_folder(name, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = following
            place = Path(name) if name == "/" else place / name
            _check_folder(place, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_folder(name: str, *, dir_fd: int | None = None) -> int:
    return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def _check_link(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in trusted_owners() and not _is_unmapped(status.st_uid):
        raise RunError(
            f"{path} is a link of uid {status.st_uid}, who could let it lead to another place",
            hint="name the place itself, run.root=DIR or --root DIR, as `realpath` prints it",
        )


def _check_folder(path: Path, status: os.stat_result) -> None:
    if not _may_lead(status):
        raise refusal(path, status, "its owner could replace your files")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise refusal(path, status, "anybody could replace your files")


def _may_lead(status: os.stat_result) -> bool:
    """Returns whether the owner of a folder may be on the way to this user's files, see `enter_folder`."""
    is_of_site = status.st_uid < _FIRST_PERSON or _is_unmapped(status.st_uid)
    if status.st_uid in trusted_owners() or is_of_site or os.geteuid() == 0:
        return True
    is_for_group = stat.S_IMODE(status.st_mode) & 0o050 == 0o050
    return is_for_group and status.st_gid in (os.getegid(), *os.getgroups())


@functools.cache
def _unmapped_owner() -> int | None:
    """Returns the uid that stands for all those that this user namespace does not have; None where it has all."""
    try:
        maps = Path("/proc/self/uid_map").read_text(encoding="utf-8").split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if maps == ["0", "0", str(2**32 - 1)] else overflow


def _is_unmapped(uid: int) -> bool:
    # In an unprivileged container root of the machine, who owns / and /scratch, has no uid.
    return uid == _unmapped_owner()


def refusal(path: Path, status: os.stat_result, why: str) -> RunError:
    """Returns the error about a place that other users could change."""
    if status.st_uid in trusted_owners():
        hint = f"`chmod go-w {path}` if you trust its content, else name another place with run.root=DIR"
    else:
        hint = "name another place with run.root=DIR, or let its owner share it with a group of yours (chmod g+rx)"
    return RunError(
        f"{path} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}: {why}", hint=hint
    )
