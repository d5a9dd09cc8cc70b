"""This user's own folders in a place where other users make files as well, such as /tmp of a node.

What lies there is loaded (checkpoints, compiled kernels, packages), so its name alone proves nothing. A folder counts
if this user owns it, nobody else may enter it, and nobody may put another one in its place. A name that another user
has taken keeps nobody out: then the folder gets a random suffix, and is found again by its owner and mode.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from slurm_train.errors import RunError

_NUM_NAMES = 10
_LONGEST_SOCKET = 107
"""Bytes of the path of a socket in the file system (unix(7)), without the NUL at its end."""
_SOCKET_NAME = "/pymp-abcdefgh/listener-abcdefgh"
"""What multiprocessing adds to the folder for temporary files."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def has_room_for_sockets(folder: str) -> bool:
    """Returns whether a path of temporary files is short enough for the sockets that multiprocessing makes below it.

    Workers of loaders hand over tensors by them. Newer Pythons take another folder where this one is too long (3.14).

    Args:
        folder: e.g. $TMPDIR.
    """
    chooses_itself = hasattr(multiprocessing.util, "_get_base_temp_dir")
    return chooses_itself or len(os.fsencode(folder + _SOCKET_NAME)) <= _LONGEST_SOCKET


def open_private(base: Path, *parts: str, key: str) -> Path:
    """Returns a folder below one of this user's own in `base`, made where it is missing.

    The user's folder is `slurm_train-<uid>`, or `slurm_train-<uid>.<suffix>` where that name is taken. Processes that
    call it at the same time get the same folder, unless the name is taken and there is no other yet.

    Args:
        base: e.g. "/tmp".
        parts: names of the folders in it, one below the other; at least one.
        key: the setting or variable that names the base, for messages, e.g. "checkpoint.local_dir".

    Raises:
        RunError: the base is not there, anybody may exchange what lies in it, or a folder in the user's own is not
            private.
        OSError: the file system refuses.
    """
    if not base.is_dir():
        raise RunError(f"{key}={base} is not a folder on this node", hint="name one that is")
    open_folder = folder_without_names(str(base))
    if open_folder is not None:
        mode = stat.filemode(os.stat(open_folder).st_mode)  # noqa: PTH116  # a string, see there
        raise RunError(
            f"{key}={base}: {open_folder} has mode {mode}, so anybody may put a folder in the place of yours",
            hint="name a folder that only you can write, e.g. $SLURM_TMPDIR, or one with the sticky bit, e.g. /tmp",
        )
    path = _users_folder(base, parts[0], key)
    for part in parts:
        path = path / part
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not is_private(str(path)):
            status = path.lstat()
            raise RunError(
                f"{path} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}; it must be a folder "
                "that only you can enter",
                hint=f"remove it, or name another {key}",
            )
    return path


def _users_folder(base: Path, first_part: str, key: str) -> Path:
    """Returns the user's folder that has the first part already, else the one without a suffix, else a new one."""
    name = f"slurm_train-{os.geteuid()}"
    candidates = [path for path in base.iterdir() if path.name == name or path.name.startswith(f"{name}.")]
    private = sorted(path for path in candidates if is_private(str(path)))
    for folder in private:
        if (folder / first_part).is_dir():
            return folder
    if private:
        return private[0]
    # Imported late, as below: ranks by the thousand import this module before anything is on their nodes' disks.
    import secrets

    for number in range(_NUM_NAMES):
        path = base / (f"{name}.{secrets.token_hex(8)}" if number else name)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
        if is_private(str(path)):  # another process has just made it
            return path
    raise RunError(f"no folder can be made in {key}={base}", hint="name another folder")


# Strings from here on: a rank asks this before it imports anything else.


def folder_without_names(base: str) -> str | None:
    """Returns the folder, this one or one above it, in which anybody may rename what others have made; None for none.

    Raises:
        OSError: one of them cannot be seen.
    """
    folder = os.path.realpath(base)
    while True:
        mode = os.stat(folder).st_mode  # noqa: PTH116
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return folder
        if folder == "/":
            return None
        folder = os.path.dirname(folder)  # noqa: PTH120


def is_private(path: str) -> bool:
    """Returns whether a path is a folder, no link, that this user owns and no other user may enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


# --- what torch and Triton compile ---

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "QUACK_CACHE_DIR": "quack"}
"""Variables of torch (2.7 to 2.13) and Triton, with a folder for each. All that they keep is loaded as code: inductor's
also holds the graphs of AOTAutograd, dynamo's states, results of autotuning and a compiler that it has installed."""
_HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"


def kernel_variables(env: Mapping[str, str], *, instead: Path) -> dict[str, str]:
    """Returns where torch and Triton are to keep what they compile; what is set already stays as it is.

    By itself torch uses `torchinductor_<user>` in the folder of temporary files: whoever makes that name first owns the
    code that the ranks load.

    Args:
        env: of this process.
        instead: a private folder that is used where the folder of temporary files is full or keeps no names.
    """
    import tempfile

    temporary = Path(tempfile.gettempdir())
    variables: dict[str, str] = {}
    # What this function has set elsewhere came along with a job that a rank has submitted.
    pattern = re.compile(rf"/slurm_train-{os.geteuid()}(?:\.[0-9a-f]+)?/kernels-")
    unset = [name for name in _FOLDERS if name not in env or pattern.search(env[name])]
    if unset:
        try:
            folder = open_private(temporary, f"kernels-{_boot_id()}", key="TMPDIR")
        except (RunError, OSError):
            folder = instead
        variables = {name: str(folder / _FOLDERS[name]) for name in unset}
    if _HEADERS not in env and not _is_claimed(temporary / f"torchinductor_{_user_name()}"):
        variables[_HEADERS] = "0"
    return variables


def compile_obstacles(env: Mapping[str, str], *, on_gpu: bool) -> list[str]:
    """Returns why torch cannot compile kernels on this node, e.g. ["no C compiler"]; nothing where it can.

    For each kernel Triton compiles a launcher in C, and Inductor compiles loops for the CPU in C++. Both include
    Python's headers and load what they have compiled.

    Args:
        env: of a rank; PATH and CC or CXX say which compiler is used.
        on_gpu: whether kernels are for a GPU.
    """
    import shutil
    import sysconfig
    import tempfile

    variable, language, usual = ("CC", "C", ["gcc", "clang"]) if on_gpu else ("CXX", "C++", ["g++"])
    named_compiler = env.get(variable)
    # A compiler may be named with its options.
    programs = usual if named_compiler is None else named_compiler.split()[:1]
    obstacles = []
    if not any(shutil.which(program, path=env.get("PATH")) for program in programs):
        tried = " or ".join(usual) if named_compiler is None else f"{variable}={named_compiler}"
        obstacles.append(f"no {language} compiler ({tried})")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        obstacles.append(f"no Python.h in {headers}")
    folder = Path(env.get("TRITON_CACHE_DIR" if on_gpu else "TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir()))
    with contextlib.suppress(OSError):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            obstacles.append(f"{folder} is mounted noexec")
    return obstacles


def _boot_id() -> str:
    """Returns what tells this boot of the machine from others.

    torch does not sync what the compiler writes: a power cut leaves libraries that are empty, and each rank that finds
    one ends (torch 2.13).
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii")[:8]
    except OSError:
        return "unknown"


def _is_claimed(folder: Path) -> bool:
    """Returns whether torch's own folder is this user's; it is made where it is missing, so nobody else can make it.

    torch keeps headers that it has compiled for the C++ compiler there, whatever its variable says.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_own and not is_open and folder_without_names(str(folder.parent)) is None


def _user_name() -> str:
    """Returns the user as torch writes it in the name of its folder."""
    import getpass

    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        return f"uid_{os.geteuid()}"
