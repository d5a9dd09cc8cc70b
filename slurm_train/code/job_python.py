"""The Python of a job: whether the nodes will find it, and which environment the person's shell lines activate.

A job gets the interpreter that submits by its full path, so an environment of venv, conda, uv or pixi needs no
activation there. What does not outlast the command, or is found by the folder that it is typed in, is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import slurm_train
from slurm_train.code.imports import own_paths
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.mounts import file_at
from slurm_train.slurm.commands import run_program

# Where `uv run --with` and `--isolated` (0.13) make an environment that is removed when the command ends.
_OF_ONE_COMMAND = re.compile(r"/builds-v\d+/\.tmp[^/]*/")
# What activates an environment in a line of bash; "conda activate" alone means its base.
_ACTIVATES = re.compile(
    r"(?:^|[;&|]|\s)(?:(?:source|\.)\s+(?P<folder>\S+)/bin/activate\b"
    r"|(?:(?:conda|mamba|micromamba)|source)\s+activate\s+(?P<name>[^\s;&|]+))"
)
# Folders that each machine has for itself.
_OF_ONE_MACHINE = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")
# Prints which of the packages that each rank imports an interpreter does not find; imports none of them.
_PRINT_MISSING = (
    "from importlib.util import find_spec\n"
    "print(*(name for name in ('slurm_train', 'torch') if find_spec(name) is None))"
)
_TRY_PYTHON_S = 20.0
_CONTAINER_NAMES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
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
    if not config.uses_cluster or config.slurm.python is not None:
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


def gone_python(config: RunConfig, python: str) -> str:
    """Returns the interpreter of a run's job if it is not there any more; "" if it is, or was chosen for the nodes.

    Args:
        config: the run's.
        python: the interpreter, "" where none is known.
    """
    if not config.uses_cluster or config.slurm.python is not None:
        return ""
    return "" if os.path.exists(python) or not python else python  # noqa: PTH110  # "" is no path


def is_in_container(env: Mapping[str, str], *, python: str = sys.executable, mounts: Mounts | None = None) -> bool:
    """Returns whether this interpreter is a file of a container, which a job that starts outside does not find.

    The first process of a machine sees the machine's own files. A path is the same for a job only if it is the same
    file there; of an interpreter that is a link, so is the one that it leads to. Where that process cannot be asked, a
    container that says so is believed.

    Args:
        env: environment of this process.
        python: the interpreter.
        mounts: what is mounted for this process and for the first one; default: as the kernel says.
    """
    mounts = Mounts.read() if mounts is None else mounts
    if not mounts.of_machine:
        return any(env.get(name) for name in _CONTAINER_NAMES)
    place = Path(python)
    paths = {PurePath(os.path.realpath(place.parent), place.name)}
    paths.add(PurePath(os.path.realpath(python)))
    return any(file_at(path, mounts.own) != file_at(path, mounts.of_machine) for path in paths)


class Mounts(NamedTuple):
    """What is mounted where."""

    own: str
    """/proc/self/mountinfo."""
    of_machine: str
    """That of the first process; "" where it is not readable."""

    @classmethod
    def read(cls) -> Mounts:
        """Returns what the kernel says of this process and of the first one."""
        texts = []
        for process in ("self", "1"):
            try:
                texts.append(Path(f"/proc/{process}/mountinfo").read_text(encoding="utf-8", errors="replace"))
            except OSError:
                texts.append("")
        return cls(*texts)


def _wrapper_in(env: Mapping[str, str], mounts: Mounts) -> str:
    """Returns the first program called python on the PATH that starts as a script and is a file of the machine."""
    for folder in env.get("PATH", "").split(os.pathsep):
        for name in ("python", "python3"):
            path = Path(folder) / name
            with contextlib.suppress(OSError):
                with path.open("rb") as file:
                    is_script = file.read(2) == b"#!"
                if is_script and not is_in_container(env, python=str(path), mounts=mounts):
                    return str(path)
    return ""


def python_notes(config: RunConfig, directory: Path, *, env: Mapping[str, str], prefix: str = sys.prefix) -> list[str]:
    """Returns lines about a Python that the nodes may not have, and about environments that the ranks do not run.

    `cluster.setup` may activate another environment than that of the command, whose Python the ranks run.

    Args:
        config: a run.
        directory: where the lines run.
        env: environment in which the interpreter of `cluster.python` is tried.
        prefix: the environment of the interpreter that submits.
    """
    cluster = config.slurm
    if not config.uses_cluster:
        return []
    mounts = Mounts.read()
    # The supervisor of a job is started by this Python also where the ranks have one of their own in an image.
    if cluster.python is None and is_in_container(env, mounts=mounts):
        wrapper = _wrapper_in(env, mounts) or "PATH_OF_THE_WRAPPER"
        return [
            f"{sys.executable} is in a container, and a job starts outside of it, where there is no such file: name "
            f"the program that enters the container, cluster.python={wrapper}"
        ]
    if config.container is not None:
        return []
    if cluster.python is not None:
        return _chosen_python_notes(cluster, env)
    notes = []
    own = next((folder for folder in _OF_ONE_MACHINE if prefix.startswith(folder)), "")
    if own:
        notes.append(
            f"the ranks run {prefix}/bin/python, and {own} is mostly a machine's own: on nodes that do not have it, "
            "the job ends at once"
        )
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


def _chosen_python_notes(cluster: ClusterSection, env: Mapping[str, str]) -> list[str]:
    """Returns what `cluster.python` lacks on this machine; one without a folder is found on the nodes alone."""
    python = cluster.python
    if python is None or not Path(python).is_absolute():
        return []
    place = "on this machine, without cluster.setup" if cluster.setup else "on this machine"
    try:
        done = run_program([python, "-c", _PRINT_MISSING], env=env, timeout_s=_TRY_PYTHON_S, cwd="/")
    except FileNotFoundError:
        return [f"cluster.python={python} is not on this machine: on nodes that do not have it, the job ends at once"]
    except (OSError, subprocess.TimeoutExpired) as err:
        return [f"cluster.python={python} could not be tried {place}: {err}"]
    if done.return_code:
        return [f"cluster.python={python} does not work {place}: {done.last_line}"]
    if not done.stdout.strip():
        return []
    packages = " and ".join(done.stdout.split())
    return [f"cluster.python={python} has no {packages} {place}: install what the ranks need into it"]


def with_absolute_python_path(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns an environment whose PYTHONPATH means in a job, which starts in another folder, what it means here."""
    if "PYTHONPATH" not in env:
        return dict(env)
    entries = [str(folder / entry) for entry in env["PYTHONPATH"].split(os.pathsep) if entry]
    return {**env, "PYTHONPATH": os.pathsep.join(entries)}
