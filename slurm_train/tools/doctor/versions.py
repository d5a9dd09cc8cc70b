"""Versions of what the ranks will import, without importing it: torch takes seconds, and a fault is named before."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from slurm_train import __version__

_CUDA = re.compile(r"^cuda(?:: Optional\[str\])? = '([^']+)'", re.MULTILINE)
_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_NUMBER = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")


def read_versions(*, driver: str = "") -> dict[str, str]:
    """Returns name -> version for python, torch, cuda, nccl, driver and this package; what is not here is left out.

    Args:
        driver: the GPU driver's version where NVML has told it.
    """
    torch = _version("torch")
    cuda = _cuda() if torch else ""
    nccl = next((found for name in ("12", "11", "13") if (found := _version(f"nvidia-nccl-cu{name}"))), "")
    versions = {
        "slurm_train": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "cuda": cuda,
        "nccl": nccl,
        "driver": driver or _driver(),
    }
    return {name: version for name, version in versions.items() if version}


def _version(name: str) -> str:
    return _told(lambda: metadata.version(name))


def _cuda() -> str:
    def read() -> str:
        path = metadata.distribution("torch").locate_file("torch/version.py")
        match = _CUDA.search(Path(str(path)).read_text(encoding="utf-8"))
        return match[1] if match else ""

    return _told(read)


def _driver() -> str:
    match = _DRIVER_NUMBER.search(_told(lambda: _DRIVER.read_text(encoding="utf-8", errors="replace")))
    return match[1] if match else ""


def _told(question: Callable[[], str]) -> str:
    try:
        return question() or ""
    except (metadata.PackageNotFoundError, OSError, KeyError, ValueError):
        return ""
