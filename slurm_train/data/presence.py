"""A look at a run's data on the login node, before anything is submitted; costs no import."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_train.errors import DataError
from slurm_train.rundir.files import read_json


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
