"""Trees of files as the drivers of GPUs make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def make_devices(folder: Path, files: Mapping[str, str]) -> tuple[Path, Path]:
    """Makes the files below /dev and /sys; returns the folders that stand for these.

    Args:
        folder: where to make them.
        files: names below /dev, with the PCI vendor and class of the card, e.g. "0x1002 0x120000", or "".
    """
    devices, sys = folder / "dev", folder / "sys"
    for name, card in files.items():
        (devices / name).parent.mkdir(parents=True, exist_ok=True)
        (devices / name).touch()
        if card:
            about = sys / "class/drm" / Path(name).name / "device"
            about.mkdir(parents=True)
            vendor, kind = card.split()
            (about / "vendor").write_text(f"{vendor}\n")
            (about / "class").write_text(f"{kind}\n")
    return devices, sys
