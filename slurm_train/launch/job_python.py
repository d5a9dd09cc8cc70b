"""The Python of a job: whether the nodes will find it, and which environment the person's shell lines activate.

A job gets the interpreter that submits by its full path, so an environment of venv, conda, uv or pixi needs no
activation there. What does not outlast the command, or is found by the folder that it is typed in, is refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

import slurm_train
from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError
from slurm_train.launch.imports import own_paths

# Where `uv run --with` and `--isolated` (0.13) make an environment that is removed when the command ends.
_OF_ONE_COMMAND = re.compile(r"/builds-v\d+/\.tmp[^/]*/")
# What activates an environment in a line of bash; "conda activate" alone means its base.
_ACTIVATES = re.compile(
    r"(?:^|[;&|]|\s)(?:(?:source|\.)\s+(?P<folder>\S+)/bin/activate\b"
    r"|(?:(?:conda|mamba|micromamba)|source)\s+activate\s+(?P<name>[^\s;&|]+))"
)
_OF_PYTHON = (BuiltinImporter, FrozenImporter, PathFinder)


def require_lasting_python(
    config: RunConfig, *, python: str = sys.executable, paths: Sequence[str] | None = None
) -> None:
    """Refuses to submit with an interpreter that a job will not find, or that will not find this package there.

    Args:
        config: a run on a cluster.
        python: the interpreter that submits.
        paths: where it finds packages, the folder that the command is typed in left out; default: its own.

    Raises:
        ConfigError: as said, with what to do.
    """
    if config.cluster is None or config.cluster.python is not None:
        return
    if config.launch == "slurm" and _OF_ONE_COMMAND.search(python):
        raise ConfigError(
            f"{python} is gone when `uv run` ends, before a job starts",
            hint="leave --with and --isolated out and add the packages to the project (`uv add PACKAGE`), or name the "
            "Python of the job: cluster.python=PATH",
        )
    paths = own_paths() if paths is None else paths
    others = [finder for finder in sys.meta_path if finder not in _OF_PYTHON]
    is_found = PathFinder.find_spec("slurm_train", paths) is not None or _is_found_by(others)
    if not is_found:
        folder = Path(slurm_train.__file__).parents[1]
        raise ConfigError(
            f"slurm_train is imported from the folder that this is typed in ({folder}), and a job starts elsewhere",
            hint=f"install it for {python} (`pip install {folder}`), or `export PYTHONPATH={folder}`",
        )


def _is_found_by(finders: Iterable[Any]) -> bool:
    """Returns whether an import hook finds this package, as those of some build backends do."""
    hooks = [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]
    return any(find_spec("slurm_train", None, None) is not None for find_spec in hooks)


def activation_notes(config: RunConfig, directory: Path, *, prefix: str = sys.prefix) -> list[str]:
    """Returns lines about environments that `cluster.setup` activates, and whose Python the ranks do not run.

    Args:
        config: a run.
        directory: where the lines run.
        prefix: the environment of the interpreter that submits.
    """
    cluster = config.cluster
    if cluster is None or cluster.python is not None or config.container is not None:
        return []
    notes = []
    for line in cluster.setup:
        for match in _ACTIVATES.finditer(line):
            name = (match["folder"] or match["name"]).strip("'\"")
            folder = Path(re.sub(r"^\$(?:HOME|\{HOME\})(?=/)", "~", name)).expanduser()
            if name == "base" or "$" in str(folder):
                # Only the job knows which folder that is.
                continue
            is_folder = match["folder"] is not None or "/" in name
            is_same = os.path.realpath(directory / folder) == os.path.realpath(prefix)
            if not (is_same if is_folder else folder.name == Path(prefix).name):
                notes.append(
                    f"cluster.setup activates {name}, but the ranks run {prefix}/bin/python; to run that of {name}: "
                    f"cluster.python={directory / folder if is_folder else 'PATH_OF_ITS_ENVIRONMENT'}/bin/python"
                )
    return notes


def with_absolute_python_path(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns an environment whose PYTHONPATH means in a job, which starts in another folder, what it means here."""
    if "PYTHONPATH" not in env:
        return dict(env)
    entries = [str(folder / entry) for entry in env["PYTHONPATH"].split(os.pathsep) if entry]
    return {**env, "PYTHONPATH": os.pathsep.join(entries)}
