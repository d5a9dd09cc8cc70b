"""Slurm's job states in a few words of our own.

squeue, sacct and scontrol use some thirty words with decorations ("CANCELLED by 1001", "CANCELLED+"); a reader of this
package sees eleven phases. Array ids in brackets are written out.
"""

from __future__ import annotations

import enum
import re

from slurm_train.errors import ClusterError

_ARRAY = re.compile(r"([0-9]+)_\[([0-9,:-]+)(?:%[0-9]+)?\]")
_INDEX_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([1-9][0-9]*))?)?")
# MaxArraySize cannot be set higher (slurm.conf).
_MAX_INDEX = 4000001


class Phase(enum.Enum):
    """Where a job stands; the value is the word shown to people."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHING = "finishing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NODE_FAIL = "node failure"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out of memory"
    UNKNOWN = "unknown"

    @property
    def is_active(self) -> bool:
        """Whether the job holds, waits for or still gives back nodes."""
        return self in (Phase.QUEUED, Phase.RUNNING, Phase.FINISHING)


_PHASES = {
    "BOOT_FAIL": Phase.NODE_FAIL,
    "CANCELLED": Phase.CANCELLED,
    "COMPLETED": Phase.COMPLETED,
    "COMPLETING": Phase.FINISHING,
    "CONFIGURING": Phase.QUEUED,
    "DEADLINE": Phase.TIMEOUT,
    "FAILED": Phase.FAILED,
    "LAUNCH_FAILED": Phase.FAILED,
    "NODE_FAIL": Phase.NODE_FAIL,
    "OUT_OF_MEMORY": Phase.OUT_OF_MEMORY,
    "PENDING": Phase.QUEUED,
    "POWER_UP_NODE": Phase.QUEUED,
    "PREEMPTED": Phase.PREEMPTED,
    "RECONFIG_FAIL": Phase.FAILED,
    "REQUEUED": Phase.QUEUED,
    "REQUEUE_FED": Phase.QUEUED,
    "REQUEUE_HOLD": Phase.QUEUED,
    "RESIZING": Phase.RUNNING,
    "RESV_DEL_HOLD": Phase.QUEUED,
    "REVOKED": Phase.CANCELLED,
    "RUNNING": Phase.RUNNING,
    "SIGNALING": Phase.RUNNING,
    "SPECIAL_EXIT": Phase.QUEUED,
    "STAGE_OUT": Phase.FINISHING,
    "STOPPED": Phase.RUNNING,
    "SUSPENDED": Phase.RUNNING,
    "TIMEOUT": Phase.TIMEOUT,
    "UPDATE_DB": Phase.FINISHING,
}


def phase_of(word: str) -> Phase:
    """Returns the phase of a state as any Slurm command writes it, e.g. "CANCELLED by 1001" or "RUNNING+".

    A word that no version known here uses gives UNKNOWN: a new Slurm must not break `status`.
    """
    first = word.split(maxsplit=1)[0] if word.strip() else ""
    return _PHASES.get(first.rstrip("+").upper(), Phase.UNKNOWN)


def expand_array_id(text: str) -> list[str]:
    """Returns one id per array element: "12_[4-6,9%2]" -> ["12_4", "12_5", "12_6", "12_9"]; other ids as they are.

    Raises:
        ClusterError: the brackets hold something else, e.g. a list that Slurm cut off with "...".
    """
    if "[" not in text:
        return [text]
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ClusterError(
            f"{text!r} is not a job array as Slurm writes it",
            hint='expected the form "12_[0-3,7%2]"; set SLURM_BITSTR_LEN=0 where Slurm cuts it off',
        )
    return [f"{match[1]}_{index}" for part in match[2].split(",") for index in _indices(text, part)]


def _indices(text: str, part: str) -> range:
    match = _INDEX_RANGE.fullmatch(part)
    if match is None or max(int(match[1]), int(match[2] or 0)) > _MAX_INDEX:
        raise ClusterError(f"{part!r} in {text!r} is not an array index", hint='expected e.g. "4", "4-7" or "0-8:2"')
    return range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
