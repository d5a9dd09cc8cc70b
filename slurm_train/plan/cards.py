"""What the GPUs of a run are, by Slurm's name or by the driver here: memory, peak, what they compute in. No torch."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.config.schema import RunConfig
from slurm_train.plan.placement import count_local_gpus
from slurm_train.slurm.commands import run_program

_ASK_S = 20.0
_GIB = 1 << 30
# The first whose words are all in a name counts. Of cards that are sold with more, the least.
_GIB_BY_NAME: Mapping[str, int] = {
    "gb300": 279,
    "gb200": 186,
    "b300": 279,
    "b200": 180,
    "h200": 141,
    "gh200": 96,
    "h20": 96,
    "h100 nvl": 94,
    "h100": 80,
    "h800": 80,
    "a100": 40,
    "a800": 80,
    "l40s": 48,
    "l40": 48,
    "l4": 24,
    "a40": 48,
    "a30": 24,
    "a10": 24,
    "a6000": 48,
    "a5000": 24,
    "a4000": 16,
    "v100": 16,
    "t4": 16,
    "p100": 12,
    "5090": 32,
    "4090": 24,
    "3090": 24,
    "mi355x": 288,
    "mi350x": 288,
    "mi325x": 256,
    "mi300x": 192,
    "mi300a": 128,
    "mi250x": 64,
    "mi250": 64,
    "mi210": 64,
}
_ASSUMED_GIB = 80
PEAK_FLOPS = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H20": 148e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "V100": 125e12,
    "MI355X": 2500e12,
    "MI350X": 2300e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 980e12,
    "MI250X": 191.5e12,
    "MI250": 181e12,
    "MI210": 181e12,
}
"""Dense bfloat16 peaks per second, from the vendors' data sheets, where half of what is given with sparsity counts. The
first name of which all words are in the device's own is taken. ROCm shows a MI250 as two devices, each of half of it.
"""
_ASSUMED_PEAK = PEAK_FLOPS["H100"]


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU."""

    name: str
    """E.g. "h100"; "GPU" where the site was not asked for a kind."""
    memory_bytes: int

    def __str__(self) -> str:
        """Returns e.g. "80 GiB of an h100"."""
        size = f"{self.memory_bytes / _GIB:.0f} GiB"
        return f"{size} of {self.name}" if self.name else f"{size}, which are assumed without cluster.gpu_type"


def card_of(config: RunConfig, env: Mapping[str, str]) -> Card | None:
    """Returns the kind of GPU that the ranks will have, None where they have none or its memory is not known.

    Where runs share a GPU (`sweep.runs_per_gpu`), its memory is a run's part of it.

    Args:
        config: the run's; without `cluster.gpu_type`, cards of 80 GiB are assumed on a cluster.
        env: environment, for looking at local GPUs.
    """
    cluster = config.slurm
    if not config.uses_cluster:
        return _local_card(tuple(sorted(env.items()))) if count_local_gpus(env) else None
    if cluster.gpu_flag == "none":
        return None
    memory_gib = _ASSUMED_GIB if cluster.gpu_type is None else memory_gib_of(cluster.gpu_type)
    if memory_gib is None:
        return None
    return Card(cluster.gpu_type or "", memory_gib * _GIB // config.sweep.runs_per_gpu)


def memory_gib_of(gpu_type: str) -> int | None:
    """Returns the memory of a card by a site's name for it, None where neither name nor size is known.

    Args:
        gpu_type: e.g. "h100", "a100-80gb", "nvidia_h100_80gb_hbm3", "a100_3g.20gb" (a part of a card).
    """
    name = gpu_type.lower()
    sizes = re.findall(r"(?<!\d)(\d+)gi?b?(?![a-z0-9.])", name)
    if sizes:
        return int(sizes[-1])
    words = {*re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name), *re.findall(r"\d{4}", name)}
    return next((size for words_of, size in _GIB_BY_NAME.items() if set(words_of.split()) <= words), None)


@functools.cache
def _local_card(env: tuple[tuple[str, str], ...]) -> Card | None:
    """Returns the smallest card of this machine by NVIDIA's driver, None where it does not answer."""
    words = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        listing = run_program(words, env=dict(env), timeout_s=_ASK_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    cards = [line.partition(",") for line in listing.splitlines()]
    sized_cards = [(int(size), name.strip()) for size, _, name in cards if size.strip().isdecimal()]
    if not sized_cards:
        return None
    size_mib, name = min(sized_cards)
    return Card(name, size_mib << 20)


def peak_flops_of(config: RunConfig, env: Mapping[str, str]) -> float | None:
    """Returns the dense bfloat16 peak of the GPUs that the ranks will have; None where it is not known.

    Args:
        config: the run's; without `cluster.gpu_type`, H100s are assumed on a cluster.
        env: environment, for looking at local GPUs.
    """
    card = card_of(config, env)
    if card is None:
        return None
    if not card.name:
        return _ASSUMED_PEAK
    words = set(re.findall(r"[a-z0-9]+", card.name.lower()))
    return next((peak for name, peak in PEAK_FLOPS.items() if set(name.lower().split()) <= words), None)


def has_gpus(config: RunConfig, env: Mapping[str, str]) -> bool:
    """Returns whether the ranks will have GPUs."""
    return config.slurm.gpu_flag != "none" if config.uses_cluster else count_local_gpus(env) > 0


def in_half(config: RunConfig, *, on_gpu: bool) -> bool:
    """Returns whether matrix products will be in a type of two bytes."""
    precision = config.train.precision
    return (
        precision in ("bfloat16", "float16", "fp8")
        or (precision == "auto" and on_gpu)
        or config.train.param_dtype == "bfloat16"
    )
