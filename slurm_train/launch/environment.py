"""What a run's code runs on, and where it came from: packages, torch, driver and GPUs; words, git commit, difference.

`provenance.json` is written when the job id has been printed, so that no submission waits for it; each attempt writes
the environment of its own node. Both are read by people and by `diff`, never by the run itself. No package is imported.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from slurm_train.config.secrets import redact
from slurm_train.launch.imports import own_paths
from slurm_train.launch.snapshot import Source, run_git
from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.paths import RunDirectory, existing_attempts

_TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=]*=\s*'([^']+)'", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia")
_COMPARED = ("python", "torch", "cuda", "driver", "gpus", "slurm", "executable")
_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One environment, on one machine."""

    python: str | None = None
    executable: str | None = None
    platform: str | None = None
    host: str | None = None
    torch: str | None = None
    cuda: str | None = None
    """What torch was built for, e.g. "12.8"; "rocm 6.2" for AMD; None for a CPU build or without torch."""
    driver: str | None = None
    """NVIDIA's driver here, None where there is none."""
    gpus: list[str] = field(default_factory=list)
    """Models of the GPUs here, e.g. ["NVIDIA H100 80GB HBM3", ...]."""
    slurm: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    """Version by canonical name, as `pip freeze` would have them."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Packages that come from no index: url, and "editable" or "commit" where they apply."""


@dataclass(frozen=True, slots=True, order=True)
class EnvironmentChange:
    """One fact or package that is not the same in two environments; None: it is not there."""

    name: str
    old: str | None
    new: str | None
    is_package: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.old or 'none'} -> {self.new or 'none'}"


def read_environment(*, slurm: str | None, paths: Sequence[str] | None = None) -> Environment:
    """Returns the environment of this process.

    Args:
        slurm: Slurm's version, None where it is not known.
        paths: where packages lie; None: where this process finds them.
    """
    folders = own_paths() if paths is None else list(paths)
    kernel = os.uname()
    packages: dict[str, str] = {}
    sources: dict[str, dict[str, Any]] = {}
    # Of a package that lies in two folders the first counts, as it does for Python.
    for item in distributions(path=list(dict.fromkeys(folders))):
        name = re.sub(r"[-_.]+", "-", item.metadata["Name"] or "").lower()
        if name and name not in packages:
            packages[name] = item.version or "?"
            if source := _source_of(item):
                sources[name] = source
    driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text_of(_DRIVER / "version"))
    models = (
        re.search(r"^Model:\s*(.+?)\s*$", _text_of(path), re.MULTILINE)
        for path in sorted(_DRIVER.glob("gpus/*/information"))
    )
    return Environment(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        platform=" ".join((kernel.sysname, kernel.release, kernel.machine)),
        host=socket.gethostname(),
        torch=packages.get("torch"),
        cuda=_torch_build(folders),
        driver=driver and driver[1],
        gpus=["unknown" if model is None else model[1] for model in models],
        slurm=slurm,
        packages=dict(sorted(packages.items())),
        sources=dict(sorted(sources.items())),
    )


def environment_from(value: Mapping[str, Any]) -> Environment:
    """Returns the environment that was written as JSON; what is missing is None or empty."""
    return Environment(**{name: value[name] for name in Environment.__dataclass_fields__ if name in value})


def _source_of(item: Distribution) -> dict[str, Any]:
    """Returns what PEP 610's direct_url.json says, in short."""
    try:
        value = json.loads(item.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    if not value:
        return {}
    source: dict[str, Any] = {"url": redact(str(value.get("url", "")))}
    if (value.get("dir_info") or {}).get("editable"):
        source["editable"] = True
    commit = (value.get("vcs_info") or {}).get("commit_id")
    return source | ({"commit": str(commit)} if commit else {})


def _torch_build(folders: Iterable[str]) -> str | None:
    for folder in folders:
        if text := _text_of(Path(folder, "torch", "version.py")):
            found = dict(_TORCH_BUILD.findall(text))
            return found.get("cuda") or (f"rocm {found['hip']}" if "hip" in found else None)
    return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def environment_changes(old: Environment, new: Environment) -> list[EnvironmentChange]:
    """Returns what differs: facts first, then packages by name. Host and platform alone are no change."""
    found = [EnvironmentChange(name, _fact(old, name), _fact(new, name)) for name in _COMPARED]
    found += [
        EnvironmentChange(name, _package(old, name), _package(new, name), is_package=True)
        for name in sorted({*old.packages, *new.packages} - {"torch"})
    ]
    return [change for change in found if change.old != change.new]


def _fact(environment: Environment, name: str) -> str | None:
    value = getattr(environment, name)
    if isinstance(value, list):
        return ", ".join(f"{value.count(item)} x {item}" for item in dict.fromkeys(value)) or None
    return None if value is None else str(value)


def _package(environment: Environment, name: str) -> str | None:
    version, source = environment.packages.get(name), environment.sources.get(name)
    if version is None or source is None:
        return version
    kind = "editable" if source.get("editable") else str(source.get("commit", ""))[:12]
    return f"{version} ({kind} {source['url']})".replace("( ", "(")


def write_provenance(path: Path, source: Source, *, words: Sequence[str], slurm: str | None) -> None:
    """Writes `provenance.json`.

    Args:
        path: the file.
        source: the code that was copied, and what git says about it.
        words: the command line.
        slurm: Slurm's version, None where it plays no part.
    """
    environment = read_environment(slurm=slurm)
    first, *others = (
        {
            "git_commit": folder.state.commit,
            "git_dirty": bool(folder.state.difference),
            "git_diff": redact(folder.state.difference),
        }
        for folder in source.folders
    )
    facts = {
        "words": [redact(word) for word in words],
        "directory": source.places[""],
        "user": getpass.getuser(),
        "time_unix_s": time.time(),
        **first,
        "num_files": len(source.names),
        "folders": [
            {"path": str(folder.path), "copied_to": folder.prefix, **git}
            for folder, git in zip(source.folders[1:], others, strict=True)
        ],
        "elsewhere": [_elsewhere(place, environment) for place in source.elsewhere],
        "environment": asdict(environment),
    }
    write_atomic(path, json.dumps(facts, indent=2) + "\n", durable=False)


def _elsewhere(place: str, environment: Environment) -> dict[str, Any]:
    """Returns what is known of a folder that packages are imported from and that was not copied."""
    installed = [
        name
        for name, source in environment.sources.items()
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


def environment_of(run: RunDirectory) -> Environment | None:
    """Returns the environment that a run was carried out in: its newest attempt's, else that of its submission."""
    for attempt in reversed(existing_attempts(run)):
        if (found := read_json(run.environment(attempt))) is not None:
            return environment_from(found)
    submitted = (read_json(run.provenance) or {}).get("environment")
    return None if submitted is None else environment_from(submitted)


def record_environment(run: RunDirectory, attempt: int, *, slurm: str | None) -> list[str]:
    """Writes the environment of an attempt and returns what has changed since the one before, e.g. "numpy: 1 -> 2".

    Called where the batch script runs. The first attempt is compared with the submission, where that was typed with the
    same interpreter.
    """
    now = read_environment(slurm=slurm)
    before = environment_of(run)
    write_atomic(run.environment(attempt), json.dumps(asdict(now), indent=1) + "\n", durable=False)
    if before is None or not before.packages or before.executable != now.executable:
        return []
    # A login node has another driver, or none, and may name another Slurm.
    found = [change for change in environment_changes(before, now) if change.is_package or change.name == "python"]
    return [str(change) for change in found]
