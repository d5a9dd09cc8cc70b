"""What a run's code runs on: Python, installed packages, torch and CUDA, driver and GPUs, Slurm.

Read from the file system alone: no package is imported and no process started, and the names of the folders that
installers leave tell name and version, so hundreds of packages cost a millisecond or two (importlib.metadata parses
each one's metadata, fifty times as long).
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.config.secrets import redact
from slurm_train.launch.editable import own_paths

_INFO = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py\d[\d.]*)?\.(?:dist|egg)-info", re.IGNORECASE)
_TORCH_BUILD = re.compile(r"^(cuda|hip)\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia")
_FACTS = ("python", "executable", "platform", "host", "torch", "cuda", "driver", "gpus", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One environment, on one machine."""

    python: str
    executable: str
    platform: str
    host: str
    torch: str | None
    cuda: str | None
    """What torch was built for, e.g. "12.8"; "rocm 6.2" for AMD; None for a CPU build or without torch."""
    driver: str | None
    """NVIDIA's driver here, None where there is none."""
    gpus: list[str]
    """Models of the GPUs here, e.g. ["NVIDIA H100 80GB HBM3", ...]."""
    slurm: str | None
    packages: dict[str, str]
    """Version by canonical name, as `pip freeze` would have them."""
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Packages that come from no index: url, and "editable" or "commit" where they apply."""

    def as_json(self) -> dict[str, Any]:
        """Returns the plain mapping."""
        return asdict(self)


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
    packages, sources = read_packages(folders)
    return Environment(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        platform=" ".join((kernel.sysname, kernel.release, kernel.machine)),
        host=socket.gethostname(),
        torch=packages.get("torch"),
        cuda=_torch_build(folders),
        driver=_driver(),
        gpus=_gpus(),
        slurm=slurm,
        packages=packages,
        sources=sources,
    )


def environment_from(value: Mapping[str, Any]) -> Environment:
    """Returns the environment that `as_json` has described; what is missing is None or empty."""
    names = Environment.__dataclass_fields__
    empty: dict[str, Any] = {**dict.fromkeys(_FACTS), "gpus": [], "packages": {}, "sources": {}}
    return Environment(**(empty | {name: found for name, found in value.items() if name in names}))


def read_packages(folders: Iterable[str]) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Returns versions by canonical name, and where packages come from that come from no index.

    Args:
        folders: where to look; of a package that lies in two of them the first counts, as it does for Python.
    """
    packages: dict[str, str] = {}
    sources: dict[str, dict[str, Any]] = {}
    for entry in (entry for folder in dict.fromkeys(folders) for entry in _infos(folder)):
        name, version = _name_and_version(entry)
        if not name or name in packages:
            continue
        packages[name] = version
        source = _source_of(entry)
        if source:
            sources[name] = source
    return dict(sorted(packages.items())), dict(sorted(sources.items()))


def _infos(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
    except OSError:
        return


def _name_and_version(entry: os.DirEntry[str]) -> tuple[str, str]:
    found = _INFO.fullmatch(entry.name)
    if found is not None:
        return _canonical(found["name"]), found["version"].replace("_", "-")
    # `setup.py develop` leaves a folder without a version, beside the sources.
    try:
        text = Path(entry.path, "PKG-INFO").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", ""
    version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return _canonical(entry.name.rpartition(".")[0]), version[1] if version else "?"


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _source_of(entry: os.DirEntry[str]) -> dict[str, Any]:
    """Returns what PEP 610's direct_url.json says, in short."""
    if entry.name.endswith(".egg-info"):
        is_develop = entry.is_dir() and _INFO.fullmatch(entry.name) is None
        return {"url": Path(entry.path).resolve().parent.as_uri(), "editable": True} if is_develop else {}
    try:
        value = json.loads(Path(entry.path, "direct_url.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    source: dict[str, Any] = {"url": redact(str(value.get("url", "")))}
    if (value.get("dir_info") or {}).get("editable"):
        source["editable"] = True
    commit = (value.get("vcs_info") or {}).get("commit_id")
    return source | ({"commit": str(commit)} if commit else {})


def _torch_build(folders: Iterable[str]) -> str | None:
    for folder in folders:
        try:
            text = Path(folder, "torch", "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        found = {name: version for name, version in _TORCH_BUILD.findall(text) if version}
        return found.get("cuda") or (f"rocm {found['hip']}" if "hip" in found else None)
    return None


def _driver() -> str | None:
    try:
        text = (_DRIVER / "version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _gpus() -> list[str]:
    models = []
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        try:
            found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            continue
        models.append(found[1] if found else "unknown")
    return models


def environment_changes(old: Environment, new: Environment) -> list[EnvironmentChange]:
    """Returns what differs: facts first, then packages by name. Host and platform alone are no change."""
    facts = ("python", "torch", "cuda", "driver", "gpus", "slurm", "executable")
    pairs = ((name, _text(getattr(old, name)), _text(getattr(new, name))) for name in facts)
    found = [EnvironmentChange(name, was, now) for name, was, now in pairs if was != now]
    for name in sorted({*old.packages, *new.packages} - {"torch"}):
        was, now = _package(old, name), _package(new, name)
        if was != now:
            found.append(EnvironmentChange(name, was, now, is_package=True))
    return found


def _package(environment: Environment, name: str) -> str | None:
    version = environment.packages.get(name)
    source = environment.sources.get(name)
    if version is None or source is None:
        return version
    kind = "editable" if source.get("editable") else str(source.get("commit", ""))[:12]
    return f"{version} ({kind} {source['url']})".replace("( ", "(")


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        counts = {item: value.count(item) for item in value}
        return ", ".join(f"{count} x {item}" for item, count in counts.items()) or None
    return None if value is None else str(value)
