"""A look at a run's data on the login node, before anything is submitted; costs no import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from slurm_train.errors import DataError
from slurm_train.rundir.files import read_json


def fingerprint_of(hashes: Iterable[str], *, context: int) -> str:
    """Returns the fingerprint of prepared text: its shards' hashes and the length of a window, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(f"{context} {' '.join(hashes)}".encode())


def known_fingerprint(data: Mapping[str, Any], *, cwd: Path) -> str | None:
    """Returns the training samples' fingerprint where it can be told without the data set's own code, else None.

    Args:
        data: the `data` mapping of a configuration.
        cwd: directory that a relative path starts from.
    """
    if data.get("_target_") == "slurm_train.data.stdlib.build" and not data.get("path"):
        from slurm_train.data.stdlib import default_path

        directory = default_path()
    elif data.get("_target_") in ("slurm_train.data.text.build", "slurm_train.data.stdlib.build"):
        directory = cwd / Path(str(data.get("path"))).expanduser()
    else:
        return None
    try:
        shards = (read_json(directory / "index.json") or {})["splits"]["train"]["shards"]
        return fingerprint_of([str(shard["xxh3_128"]) for shard in shards], context=int(data.get("context", 256)))
    except (KeyError, TypeError, OSError):
        return None


def require_readable(data: Mapping[str, Any], *, cwd: Path) -> None:
    """Does nothing where the configured data set can be read, or where only its own code can tell.

    Args:
        data: the `data` mapping of a configuration.
        cwd: directory that a relative path starts from.

    Raises:
        DataError: prepared text is asked for, and the directory holds none.
    """
    if data.get("_target_") != "slurm_train.data.text.build":
        return
    directory = cwd / Path(str(data.get("path"))).expanduser()
    if read_json(directory / "index.json") is None:
        raise DataError(
            f"data.path={data.get('path')} holds no prepared text: {directory / 'index.json'} is missing or broken",
            hint=f"make it with `python -m slurm_train prepare TEXT_FILES --out {data.get('path')}`",
        )
