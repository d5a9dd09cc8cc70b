"""Limits of a shell on each of its processes (`ulimit`), which Slurm passes on to the job and srun to the ranks.

By Slurm's default (`PropagateResourceLimits=ALL`) the batch script has the limits of the shell that submits, and srun
gives the ranks those of the process that calls it. So this process's limits are those of its job, or of its ranks.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slurm_train.formatting import byte_size, duration

Limits = Mapping[str, int]
"""The finite limits of a process by Slurm's names, e.g. {"CPU": 3600}: in seconds, bytes, or a number."""


@dataclass(frozen=True, slots=True)
class _Kind:
    number: int
    """Of the resource."""
    letter: str
    """Of bash's `ulimit`."""
    what: str


_KINDS = {
    "CPU": _Kind(resource.RLIMIT_CPU, "t", "of processor time"),
    "FSIZE": _Kind(resource.RLIMIT_FSIZE, "f", "in one file"),
    "DATA": _Kind(resource.RLIMIT_DATA, "d", "of data in memory"),
    "AS": _Kind(resource.RLIMIT_AS, "v", "of address space"),
    "NPROC": _Kind(resource.RLIMIT_NPROC, "u", "processes and threads of its user"),
}
_IN_BYTES = ("FSIZE", "DATA", "AS")
# What no file of a run comes to; and CUDA takes addresses for all memory of the node and of its GPUs.
_PLENTY_BYTES = 1 << 40


def read_limits() -> Limits:
    """Returns the soft limits of this process that are finite."""
    limits = {name: resource.getrlimit(kind.number)[0] for name, kind in _KINDS.items()}
    return {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}


def tight(limits: Limits, *, run_s: float | None, cpus: int | None) -> list[str]:
    """Returns which limits a training may come to. That on processes is usual, and is none of them.

    Args:
        limits: of a process.
        run_s: how long a rank runs at most; None: not known.
        cpus: how many CPUs it has; None: not known.
    """
    most_s = None if run_s is None or cpus is None else run_s * cpus
    found = [name for name in _IN_BYTES if limits.get(name, _PLENTY_BYTES) < _PLENTY_BYTES]
    has_time = "CPU" not in limits or (most_s is not None and limits["CPU"] >= most_s)
    return found if has_time else ["CPU", *found]


def passed_on(names: Collection[str], *, setting: str, but: str, propagate: str, setup: Sequence[str]) -> list[str]:
    """Returns which limits of the shell that submits a job's ranks have.

    Args:
        names: of limits.
        setting: PropagateResourceLimits of the site, e.g. "ALL"; "" where it says which are not.
        but: PropagateResourceLimitsExcept.
        propagate: sbatch's --propagate, which decides before the site; "" where it is not set.
        setup: `cluster.setup`, whose lines may set other limits.
    """
    set_there = {letter for line in setup if "ulimit" in line for letter in re.findall(r" -[HS]*([a-z])\b", line)}
    chosen = _names_in(propagate) or _names_in(setting)
    left_out = set() if propagate else _names_in(but)
    return [
        name
        for name in names
        if _KINDS[name].letter not in set_there
        and name not in left_out
        and "NONE" not in chosen
        and (not chosen or "ALL" in chosen or name in chosen)
    ]


def _names_in(setting: str) -> set[str]:
    names = re.split(r"[,\s]+", setting.upper().replace("(NULL)", ""))
    return {name.removeprefix("RLIMIT_") for name in names if name}


def in_words(limits: Limits, name: str) -> str:
    """Returns what a process may have, e.g. "3 s of processor time (ulimit -t)"."""
    kind = _KINDS[name]
    limit = limits[name]
    amount = duration(limit) if name == "CPU" else byte_size(limit) if name in _IN_BYTES else f"{limit:,}"
    return f"{amount} {kind.what} (ulimit -{kind.letter})"


def way_out(names: Sequence[str]) -> str:
    """Returns what lifts these limits, wherever they are from."""
    lines = ",".join(f"ulimit -{_KINDS[name].letter} unlimited" for name in names)
    return f"cluster.setup=[{lines}] lifts {'it' if len(names) == 1 else 'them'}, or cluster.sbatch.propagate=NONE"
