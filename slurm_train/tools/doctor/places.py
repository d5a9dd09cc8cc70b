"""What a node sees of the run, and whether it can write where it must: hashes, presence, room. Bounded in time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import string
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from slurm_train.config.schema import RunConfig
from slurm_train.data.shards import known_fingerprint
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.doctor.facts import DiskFacts, FilesFacts

_MIB = 1 << 20
# A snapshot may be 100 MB on a busy file system: the sources first, as far as the time goes.
_HASHING_S = 1.0
_LONGEST_LIST = 20
_PATH_KEYS = ("path", "root", "dir", "folder", "directory", "file")
_TEXT_TARGET = "slurm_train.data.text.build"


def read_files(run: RunDirectory, config: RunConfig, *, directory: Path, hashing_s: float = _HASHING_S) -> FilesFacts:
    """Returns what this node sees of the run.

    Args:
        run: the run.
        config: its configuration, as read here.
        directory: what relative paths of the data start from.
        hashing_s: seconds that the code's files may take.
    """
    index = read_json(run.code_index) or {}
    files = index.get("files")
    data = config.data or {}
    return FilesFacts(
        code_index=_digest(json.dumps(files, sort_keys=True).encode()) if isinstance(files, dict) else "",
        code_changes=_code_changes(run.code, files, hashing_s) if isinstance(files, dict) else [],
        config=_digest(*(_content(path) for path in (run.config, run.plan))),
        data=(known_fingerprint(data, cwd=directory) or "") if config.trains else "",
        data_missing=_missing(data, directory) if config.trains else [],
        data_empty=[str(path) for path in _paths(data) if _is_empty(path)] if config.trains else [],
    )


def _code_changes(code: Path, files: Mapping[str, Any], hashing_s: float) -> list[str]:
    deadline = time.monotonic() + hashing_s
    found: list[str] = []
    for name in sorted(files, key=lambda name: (not name.endswith(".py"), name)):
        if time.monotonic() > deadline or len(found) >= _LONGEST_LIST:
            break
        try:
            same = _digest((code / name).read_bytes()) == files[name]
        except OSError:
            found.append(f"{name} (gone)")
            continue
        if not same:
            found.append(name)
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _digest(*parts: bytes) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _missing(data: Mapping[str, Any], directory: Path) -> list[str]:
    """Returns what of the configured data is not here: all shards of prepared text, else paths that the keys name."""
    if data.get("_target_") == _TEXT_TARGET:
        return _missing_shards(directory / Path(str(data.get("path"))).expanduser())
    return [str(path) for path in _paths(data) if not path.exists()]


def _paths(data: Mapping[str, Any]) -> list[Path]:
    if str(data.get("_target_", "")).startswith("slurm_train."):
        return []  # Made on demand, or looked at with more knowledge.
    named = [value for key, value in data.items() if _names_path(key) and isinstance(value, str)]
    # Only what is a path for certain; "train" or "openwebtext" may be the name of anything.
    return [Path(value).expanduser() for value in named if value.startswith(("/", "~"))]


def _is_empty(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:
        return False


def _names_path(key: str) -> bool:
    return any(key == word or key.endswith(f"_{word}") for word in _PATH_KEYS)


def _missing_shards(directory: Path) -> list[str]:
    index = directory / "index.json"
    value = read_json(index)
    if value is None:
        return [str(index)]
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        width = int(str(value["dtype"])[-1])
        shards = [shard for split in value["splits"].values() for shard in split["shards"]]
        wrong = [
            directory / shard["file"] for shard in shards if _size(directory / shard["file"]) != shard["tokens"] * width
        ]
        return [f"{path} ({'gone' if _size(path) < 0 else 'another size'})" for path in wrong[:_LONGEST_LIST]]
    return [f"{index} (not an index)"]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def read_disks(run: RunDirectory, config: RunConfig, env: Mapping[str, str]) -> list[DiskFacts]:
    """Returns the places that ranks of this node write to, each after a small file was written and removed."""
    local = config.checkpoint.local_dir
    places = [("run directory", str(run.checkpoints))]
    if local is not None and config.trains:
        places.append(("checkpoint.local_dir", string.Template(local).safe_substitute(env)))
    places += [("temporary files", tempfile.gettempdir()), ("shared memory", "/dev/shm")]
    return [_read_disk(role, path) for role, path in places]


def _read_disk(role: str, path: str) -> DiskFacts:
    error = _try_to_write(Path(path))
    try:
        room = os.statvfs(path)
    except OSError as err:
        error = error or err
        return DiskFacts(role=role, path=path, **_kind(error))
    return DiskFacts(
        role=role,
        path=path,
        free_mb=room.f_bavail * room.f_frsize // _MIB,
        total_mb=room.f_blocks * room.f_frsize // _MIB,
        # Some file systems count none.
        free_inodes=room.f_favail if room.f_files else None,
        **_kind(error),
    )


def _kind(error: OSError | None) -> dict[str, Any]:
    if error is None:
        return {}
    return {
        "error": error.strerror or str(error),
        "is_full": error.errno in (errno.ENOSPC, errno.EDQUOT),
        "is_readonly": error.errno in (errno.EROFS, errno.EACCES, errno.EPERM),
    }


def _try_to_write(folder: Path) -> OSError | None:
    path = folder / f".preflight_{os.uname().nodename}_{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as err:
        return err
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return None
