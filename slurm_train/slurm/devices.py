"""Which GPUs a node has and which of them this process was given, by its environment and by the files of the drivers.

Read without torch and without a vendor's library. Slurm names GPUs with the variable of each vendor, and with several
of them where `gres.conf` does not say which vendor it is; such names may also be of devices that are only pretended. So
a rank that was named GPUs has some only where a driver's files are there, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that name the GPUs of a process: NVIDIA's, which ROCm follows as well, two of AMD, Intel's."""
_NONE = ("", "-1", "NoDevFiles")
_VENDORS: Mapping[str, Literal["AMD", "Intel"]] = {"0x1002": "AMD", "0x8086": "Intel"}
# PCI class 0x0300 is a card with a screen. The graphics of laptops are among them, which no one wants to train on.
_WITH_SCREEN = "0x0300"


class Gpu(NamedTuple):
    """One GPU of a node."""

    vendor: Literal["NVIDIA", "AMD", "Intel"]
    file: str
    """Name of the driver's file, e.g. "nvidia0", "renderD128"."""


def visible_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs that an environment names, None where it says nothing of them.

    The first variable of `VISIBLE` that is set counts. As CUDA does, it stops at the first name of none.

    Args:
        env: environment of a process, e.g. with CUDA_VISIBLE_DEVICES="0,1".
    """
    setting = next((env[name] for name in VISIBLE if name in env), None)
    if setting is None:
        return None
    names = [part.strip() for part in setting.split(",")]
    return list(itertools.takewhile(lambda name: name not in _NONE, names))


def installed_gpus(*, devices: Path = Path("/dev"), sys: Path = Path("/sys")) -> list[Gpu]:
    """Returns the GPUs of this node whose drivers are loaded, those of AMD and Intel without cards that have a screen.

    Args:
        devices: where the drivers have their files.
        sys: where the kernel shows its devices.
    """
    nvidia = [Gpu("NVIDIA", path.name) for path in sorted(devices.glob("nvidia[0-9]*"))]
    return [*nvidia, *_other_gpus(devices, sys)]


def _other_gpus(devices: Path, sys: Path) -> Iterator[Gpu]:
    for path in sorted(devices.glob("dri/renderD*")):
        card = sys / "class/drm" / path.name / "device"
        try:
            vendor = _VENDORS.get((card / "vendor").read_text().strip())
            has_screen = (card / "class").read_text().startswith(_WITH_SCREEN)
        except OSError:
            # A container may hide the kernel's files.
            continue
        # ROCm computes through /dev/kfd.
        is_usable = vendor == "Intel" or (devices / "kfd").exists()
        if vendor is not None and is_usable and not has_screen:
            yield Gpu(vendor, path.name)
