"""Where a run came from: words, code, packages, machine. Read by people and by `diff`, never by the run itself.

Written when the job id has been printed, so that no submission waits for it.
"""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.config.secrets import redact
from slurm_train.launch.environment import Environment, environment_changes, environment_from, read_environment
from slurm_train.launch.snapshot import FILTERS, OtherFolder, git_command, read_filters
from slurm_train.launch.source import Source
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory, existing_attempts

_VERSIONS = ("torch", "numpy", "submitit", "hydra-core", "omegaconf", "xxhash", "safetensors")
_GIT_TIMEOUT_S = 10.0


def write_provenance(path: Path, source: Source, *, words: Sequence[str], slurm: str | None) -> None:
    """Writes `provenance.json`.

    Args:
        path: the file.
        source: the code that was copied, and what git said about it.
        words: the command line.
        slurm: Slurm's version, None where it plays no part.
    """
    environment = read_environment(slurm=slurm)
    facts = {
        "words": [redact(word) for word in words],
        "directory": str(source.directory),
        "user": getpass.getuser(),
        "host": environment.host,
        "python": sys.executable,
        "time_unix_s": time.time(),
        "git_commit": source.state.commit,
        "git_dirty": bool(source.state.difference),
        "git_diff": redact(source.state.difference),
        "num_files": len(source.names),
        "folders": [_folder(other) for other in source.others],
        "elsewhere": [_elsewhere(place, environment) for place in source.elsewhere],
        "versions": {
            "python": environment.python,
            **{name: environment.packages.get(name, "not installed") for name in _VERSIONS},
        },
        "environment": environment.as_json(),
    }
    write_atomic(path, json.dumps(facts, indent=2) + "\n", durable=False)


def _folder(other: OtherFolder) -> dict[str, Any]:
    """Returns what is known of a further folder that was copied."""
    return {
        "path": str(other.directory),
        "copied_to": other.prefix,
        "git_commit": other.state.commit,
        "git_dirty": bool(other.state.difference),
        "git_diff": redact(other.state.difference),
    }


def _elsewhere(place: str, environment: Environment) -> dict[str, Any]:
    """Returns what is known of a folder that packages are imported from and that was not copied."""
    sources = environment.sources.items()
    installed = [name for name, source in sources if source.get("editable") and _is_in(place, str(source["url"]))]
    commit = _git(place, "rev-parse", "HEAD")
    filters = read_filters((_git(place, *FILTERS) or "").encode())
    words = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
    changed = _git(place, *words, filters=filters) if commit and filters is not None else None
    return {
        "path": place,
        "packages": installed,
        "git_commit": commit,
        "git_dirty": None if changed is None else bool(changed),
    }


def _is_in(place: str, url: str) -> bool:
    return Path(place).is_relative_to(Path(url.removeprefix("file://")).resolve())


def _git(folder: str, *words: str, filters: Sequence[str] = ()) -> str | None:
    """Returns what git says about a folder, None where it says nothing."""
    try:
        done = subprocess.run(
            git_command(folder, *words, filters=filters),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def environment_of(run: RunDirectory) -> Environment | None:
    """Returns the environment that a run was carried out in: its newest attempt's, else that of its submission."""
    for attempt in reversed(existing_attempts(run)):
        if (found := read_json(run.environment(attempt))) is not None:
            return environment_from(found)
    found = read_json(run.provenance)
    return None if found is None else _submitted(found)


def _submitted(provenance: Mapping[str, Any]) -> Environment:
    # Before there was an environment there were some versions.
    versions = {name: text for name, text in provenance.get("versions", {}).items() if text != "not installed"}
    old = {"python": versions.pop("python", ""), "torch": versions.get("torch"), "packages": versions}
    old |= {"executable": provenance.get("python", ""), "host": provenance.get("host", ""), "platform": ""}
    return environment_from(provenance.get("environment") or old)


def record_environment(run: RunDirectory, attempt: int, *, slurm: str | None) -> list[str]:
    """Writes the environment of an attempt and returns what has changed since the one before, in words.

    Called where the batch script runs. The first attempt is compared with the submission, where that was typed with the
    same interpreter.
    """
    now = read_environment(slurm=slurm)
    before = environment_of(run)
    write_atomic(run.environment(attempt), json.dumps(now.as_json(), indent=1) + "\n", durable=False)
    if before is None or not before.packages or before.executable != now.executable:
        return []
    # A login node has another driver, or none, and Slurm's name there is nobody's concern here.
    found = [change for change in environment_changes(before, now) if change.is_package or change.name == "python"]
    return [str(change) for change in found]
