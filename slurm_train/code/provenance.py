"""The environment of a run (packages, torch, driver, GPUs) and the origin of its code (words, git commit, difference).

`provenance.json` is written after the job id has been printed, so that no submission waits for it; each attempt writes
the environment of its own node. People and `diff` read both files; the run itself never does. No package is imported.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.code.git import SourceState, run_git
from slurm_train.code.hub import hub_snapshots
from slurm_train.code.imports import own_paths
from slurm_train.code.snapshot import Source
from slurm_train.config.schema import RunConfig
from slurm_train.config.secrets import redact
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.paths import RunDirectory, existing_attempts

_DRIVER = Path("/proc/driver/nvidia")
_COMPARED = ("python", "torch", "cuda", "driver", "gpus", "slurm", "executable")
_GIT_TIMEOUT_S = 10.0


class EnvironmentChange(NamedTuple):
    """One fact or package that differs between two environments; None: it is missing there."""

    name: str
    old: str | None
    new: str | None
    is_package: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.old or 'none'} -> {self.new or 'none'}"


def read_environment(*, slurm: str | None, paths: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the environment of this process; None for missing facts.

    "cuda" is what torch was built for, e.g. "12.8" or "rocm 6.2" (None: a CPU build, or no torch); "gpus" are
    the models of the GPUs; "packages" has versions by canonical name, as in `pip freeze`; "sources" has the packages
    that were not installed from an index: url, and "editable" or "commit" if they apply.

    Args:
        slurm: Slurm's version, None if it is not known.
        paths: folders with packages; None: those of this process.
    """
    folders = own_paths() if paths is None else list(paths)
    kernel = os.uname()
    packages: dict[str, str] = {}
    sources: dict[str, dict[str, Any]] = {}
    # If a package lies in two folders, the first one counts, as for Python.
    for item in distributions(path=list(dict.fromkeys(folders))):
        name, version = _name_and_version(item)
        if name and name not in packages:
            packages[name] = version
            source = _source_of(item)
            if source:
                sources[name] = source
    gpus: list[str] = []
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        model = _search_file(r"(?m)^Model:\s*(.+?)\s*$", path)
        gpus.append("unknown" if model is None else model[1])
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "platform": " ".join((kernel.sysname, kernel.release, kernel.machine)),
        "host": socket.gethostname(),
        "torch": packages.get("torch"),
        **read_gpu_software(folders),
        "gpus": gpus,
        "slurm": slurm,
        "packages": dict(sorted(packages.items())),
        "sources": dict(sorted(sources.items())),
    }


def read_gpu_software(folders: Sequence[str]) -> dict[str, str | None]:
    """Returns "cuda", what the torch in some folders was built for, and "driver"; see `read_environment`."""
    builds = (
        _search_file(r"(?m)^(cuda|hip)\b[^=]*=\s*'([^']+)'", Path(folder, "torch/version.py")) for folder in folders
    )
    build = next(filter(None, builds), None)
    driver = _search_file(r"\s(\d+\.\d+(?:\.\d+)?)\s", _DRIVER / "version")
    return {
        "cuda": build and (build[2] if build[1] == "cuda" else f"rocm {build[2]}"),
        "driver": driver and driver[1],
    }


def _name_and_version(item: Distribution) -> tuple[str, str]:
    """Returns a package's canonical name ("" if it has none) and its version ("?" if it has none).

    `Distribution.metadata` parses the whole file with the package's description, nine times as long for all packages.
    """
    # An .egg-info may be a file, not a folder of files.
    text = item.read_text("METADATA") or item.read_text("PKG-INFO") or item.read_text("") or ""
    # The first empty line ends the fields; the description follows.
    fields = text.partition("\n\n")[0]
    name = re.search(r"(?m)^Name:\s*(\S+)", fields)
    version = re.search(r"(?m)^Version:\s*(\S+)", fields)
    return re.sub(r"[-_.]+", "-", name[1]).lower() if name else "", version[1] if version else "?"


def _source_of(item: Distribution) -> dict[str, Any]:
    """Returns the facts of a package's direct_url.json (PEP 610)."""
    try:
        value = json.loads(item.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    facts = {
        "url": redact(value.get("url", "")),
        "editable": value.get("dir_info", {}).get("editable"),
        "commit": value.get("vcs_info", {}).get("commit_id"),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _search_file(pattern: str, path: Path) -> re.Match[str] | None:
    try:
        return re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return None


def environment_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[EnvironmentChange]:
    """Returns the differences: facts first, then packages by name. Host and platform are not compared."""
    changes = [EnvironmentChange(name, _fact(old.get(name)), _fact(new.get(name))) for name in _COMPARED]
    names = {*old.get("packages", ()), *new.get("packages", ())} - {"torch"}
    changes += [EnvironmentChange(name, _package(old, name), _package(new, name), True) for name in sorted(names)]
    return [change for change in changes if change.old != change.new]


def _fact(value: Any) -> str | None:
    if isinstance(value, list):
        return ", ".join(f"{count} x {item}" for item, count in Counter(value).items()) or None
    return None if value is None else str(value)


def _package(environment: Mapping[str, Any], name: str) -> str | None:
    version: str | None = environment.get("packages", {}).get(name)
    source = environment.get("sources", {}).get(name)
    if version is None or source is None:
        return version
    kind = "editable" if source.get("editable") else source.get("commit", "")[:12]
    return f"{version} ({kind} {source['url']})".replace("( ", "(")


def write_provenance(path: Path, source: Source, *, words: Sequence[str], slurm: str | None, config: RunConfig) -> None:
    """Writes `provenance.json`.

    Args:
        path: the file.
        source: the code that was copied, and what git says about it.
        words: the command line.
        slurm: Slurm's version, None without a cluster.
        config: of the run, or of one run of a sweep.
    """
    environment = read_environment(slurm=slurm)
    states = {place: source.states.get(place, SourceState()) for place in source.folders}
    git = {
        place: {
            "git_commit": state.commit,
            "git_dirty": source.differs_from_commit(place),
            "git_diff": redact(state.difference),
        }
        for place, state in states.items()
    }
    facts = {
        "words": [redact(word) for word in words],
        "directory": str(source.folders[""]),
        "user": getpass.getuser(),
        "time_unix_s": time.time(),
        **git[""],
        "num_files": len(source.files),
        "folders": [
            {"path": str(folder), "copied_to": place, **git[place]} for place, folder in source.folders.items() if place
        ],
        "elsewhere": [_elsewhere(place, environment["sources"]) for place in source.elsewhere],
        "hub": [
            {"key": item.key, "repository": item.repository, "commit": item.commit, "folder": str(item.folder)}
            for item in hub_snapshots(config)
        ],
        "environment": environment,
    }
    write_atomic(path, json.dumps(facts, indent=2) + "\n", durable=False)


def _elsewhere(place: str, sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns facts about a folder that packages are imported from and that was not copied."""
    installed = [
        name
        for name, source in sources.items()
        if source.get("editable") and Path(place).is_relative_to(Path(source["url"].removeprefix("file://")).resolve())
    ]
    commit = run_git(place, "rev-parse", "HEAD", timeout_s=_GIT_TIMEOUT_S)
    words = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
    changed = run_git(place, *words, compares=True, timeout_s=_GIT_TIMEOUT_S) if commit else None
    return {
        "path": place,
        "packages": installed,
        "git_commit": commit.decode().strip() if commit else None,
        "git_dirty": None if changed is None else bool(changed.strip()),
    }


def environment_of(run: RunDirectory) -> dict[str, Any] | None:
    """Returns the environment of a run: that of its newest attempt, else that of its submission."""
    for attempt in reversed(existing_attempts(run)):
        environment = read_json(run.environment(attempt))
        if environment:
            return environment
    return (read_json(run.provenance) or {}).get("environment")


def record_environment(run: RunDirectory, attempt: int, *, slurm: str | None) -> list[str]:
    """Writes the environment of an attempt and returns the changes since the previous one, e.g. "numpy: 1 -> 2".

    Called where the batch script runs. The first attempt is compared with the submission, if that used the same
    interpreter.
    """
    environment = read_environment(slurm=slurm)
    previous = environment_of(run) or {}
    write_atomic(run.environment(attempt), json.dumps(environment, indent=1) + "\n", durable=False)
    if not previous.get("packages") or previous["executable"] != environment["executable"]:
        return []
    # The driver and the version of Slurm are not compared, since they may differ on a login node.
    changes = [
        change for change in environment_changes(previous, environment) if change.is_package or change.name == "python"
    ]
    return [str(change) for change in changes]
