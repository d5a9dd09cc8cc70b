"""How a site ends jobs: how long they live after a TERM, read from what Slurm's commands print. Pure text in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

_DURATION = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)(?: sec)?")


def duration_s(text: str) -> float | None:
    """Returns seconds for what Slurm writes as "00:00:15", "1-02:00:00", "30 sec" or "15"; None for other words."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def end_and_limit(job: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Returns when a running job's limit ends it (seconds since 1970) and how long it is; None where it has none.

    Args:
        job: the fields of `scontrol show job`, written in this machine's time zone.
    """
    try:
        start, end = (datetime.fromisoformat(job[key]).timestamp() for key in ("StartTime", "EndTime"))
    except (KeyError, ValueError):
        return None, None
    return end, end - start


def grace_s(preempt_type: str, *, qos: Mapping[str, str], partition: Mapping[str, str]) -> float:
    """Returns the seconds from the first TERM of a preemption to the last; 0 where there are none.

    Args:
        preempt_type: the controller's PreemptType, e.g. "preempt/qos".
        qos: the job's QOS by sacctmgr's names, e.g. {"GraceTime": "00:00:15", "PreemptMode": "requeue"}.
        partition: the job's partition by scontrol's names, e.g. {"GraceTime": "0", "PreemptMode": "REQUEUE"}.
    """
    side = {"preempt/qos": qos, "preempt/partition_prio": partition}.get(preempt_type, {})
    if side.get("PreemptMode", "").upper() in ("OFF", "SUSPEND"):
        return 0.0
    return duration_s(side.get("GraceTime", "")) or 0.0
