"""Where the runs of each user lie in a root: `<root>/<name>/<run id>`, in a root that several users share
`<root>/@<user>/<name>/<run id>`.

The user's folder is made by that user, so everything that steers a run lies where nobody else can make a file, and the
same words of two users are two runs. It is known by its owner: a stranger who takes the name keeps nobody out. Runs
that lie in a shared root itself, as older versions have put them there, are found as well and continue there.
"""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

from slurm_train.rundir.files import listed
from slurm_train.rundir.paths import USER_PREFIX, RunDirectory, others_may_write, typed_root
from slurm_train.trust import is_own_folder, owner_id, trusted_owners


def own_places(root: Path) -> list[Path]:
    """Returns the folders with runs of this user in a root; new runs are made in the last one. Nothing is made."""
    folder = _own_folder(root)
    if folder is None and _is_shared(root):
        taken = {path.name for path in listed(root)}
        folder = root / _user_name()
        number = 0
        while folder.name in taken:
            number += 1
            folder = root / f"{_user_name()}.{number}"
    return [root] if folder is None else [root, folder]


def place_of(root: Path, *parts: str) -> Path:
    """Returns the one of a user's places in a root that has a folder of this user with such a path, else the last."""
    places = own_places(root)
    return next((place for place in places if owner_id(place.joinpath(*parts)) == os.geteuid()), places[-1])


def all_places(root: Path) -> list[Path]:
    """Returns the folders with runs of any user in a root, as they were spelled where runs were started."""
    root = typed_root(root)
    places = [root]
    for folder in listed(root):
        if not folder.name.startswith(USER_PREFIX) or not folder.is_dir() or folder.is_symlink():
            continue
        places.append(typed_root(folder) if is_own_folder(folder) else folder)
    return places


def run_place(root: Path, name: str, run_id: str) -> RunDirectory:
    """Returns where a run of this user is or will be."""
    return RunDirectory(place_of(root, name, run_id) / name / run_id)


def _own_folder(root: Path) -> Path | None:
    folders = [path for path in listed(root) if path.name.startswith(USER_PREFIX) and owner_id(path) == os.geteuid()]
    return next((folder for folder in sorted(folders) if is_own_folder(folder)), None)


def _is_shared(root: Path) -> bool:
    """Returns whether somebody else makes folders in a root, or may do so."""
    try:
        status = root.stat()
    except OSError:
        return False
    return status.st_uid not in trusted_owners() or others_may_write(status)


def _user_name() -> str:
    """Returns the name of this user's folder, which no run can have."""
    user = str(os.geteuid())
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = user
    return USER_PREFIX + (name if re.fullmatch(r"[A-Za-z0-9._-]+", name) else user)
