"""How a site ends jobs: how long they live after a TERM, read from what Slurm's commands print. Pure text in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slurm_train.slurm.records import unix_s

_DURATION = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)(?: sec)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What becomes of a job of one QOS and partition when Slurm wants its nodes for another one."""

    by: Literal["nobody", "qos", "partition"]
    """What decides who gives way."""
    mode: str
    """Slurm's word, e.g. "REQUEUE", "CANCEL", "GANG,SUSPEND"; "OFF" where nobody preempts."""
    grace_s: float
    """From the first TERM to the last."""
    kill_wait_s: float | None
    """From the last TERM to KILL; None where Slurm does not say."""

    @property
    def outcome(self) -> Literal["never", "requeued", "cancelled", "suspended"]:
        """What a preemption does to the job."""
        if self.by == "nobody" or self.mode == "OFF":
            return "never"
        if "CANCEL" in self.mode:
            return "cancelled"
        return "suspended" if "SUSPEND" in self.mode and "REQUEUE" not in self.mode else "requeued"

    @property
    def in_words(self) -> str:
        """How a run comes back from it, e.g. "preemption requeues here: 15 s grace, then 5 s to end in"."""
        wait = "" if self.kill_wait_s is None else f"{self.kill_wait_s:g} s to end in"
        if self.outcome == "never":
            return "nobody preempts here" + (f"; {wait}" if wait else "")
        if self.outcome == "suspended":
            return "preemption suspends here: the run waits in memory and goes on in the same attempt"
        grace = f"{self.grace_s:g} s grace" + (f", then {wait}" if wait else "")
        if self.outcome == "cancelled":
            return f"preemption cancels here ({grace}): requeued within that time, else another job takes over"
        return f"preemption requeues here: {grace}"


def return_in_words(preemption: Preemption | None) -> str:
    """Returns in one line how a run comes back from the time limit, a lost node and a preemption.

    Args:
        preemption: None where Slurm does not say.
    """
    # JobRequeue=0 is a default only: every script says --requeue.
    known = "Slurm does not say what it does on preemption" if preemption is None else preemption.in_words
    return f"requeue, same job id; {known}"


def read_preemption(settings: Mapping[str, str], *, qos: Mapping[str, str], partition: Mapping[str, str]) -> Preemption:
    """Returns how jobs of a QOS and a partition are preempted.

    Args:
        settings: `scontrol show config`.
        qos: the job's QOS by sacctmgr's names; empty where there is none.
        partition: the job's partition by scontrol's names; empty where it is not known.
    """
    kind = settings.get("PreemptType", "")
    by: Literal["nobody", "qos", "partition"] = "nobody"
    mode = ""
    if kind == "preempt/qos":
        by, mode = "qos", qos.get("PreemptMode", "").upper()
    elif kind == "preempt/partition_prio":
        by, mode = "partition", partition.get("PreemptMode", "").upper()
    if mode in ("", "CLUSTER"):
        mode = settings.get("PreemptMode", "").upper()
    return Preemption(
        by=by,
        mode=mode if by != "nobody" and mode else "OFF",
        grace_s=grace_s(kind, qos=qos, partition=partition),
        kill_wait_s=duration_s(settings.get("KillWait", "")),
    )


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
        job: the fields of `scontrol show job`.
    """
    start, end = (unix_s(job.get(key, "")) for key in ("StartTime", "EndTime"))
    return (None, None) if start is None or end is None else (end, end - start)


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
