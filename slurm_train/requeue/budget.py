"""How often a run has ended in vain: pure functions of the ledger.

An attempt brought the run on if a checkpoint was committed in it. Everything in a row that did not is counted by what
ended it, since the newest attempt that did, or that stopped the run until a person started it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {
    "time_limit": "time_limit",
    "node_failure": "node_failure",
    "lost": "node_failure",
    "preempted": "preempted",
    "requeued": "preempted",
    "file_system": "file_system",
}
# A limit that is too short stays too short. Nodes fail by themselves now and then, and preemptions say nothing about
# the run: 50 in a row, be it before the first step, must not stop one.
_WEIGHTS = {"time_limit": 1, "node_failure": 2, "preempted": 30}
_WORDS = {
    "time_limit": (
        "time limits",
        "the limit is shorter than the start and the way to a checkpoint: raise cluster.time_limit_min, or lower "
        "checkpoint.every_steps",
    ),
    "node_failure": (
        "lost nodes",
        "the run itself may bring its nodes down (memory, driver): see the logs of these attempts",
    ),
    "preempted": ("preemptions", "lower checkpoint.every_steps, or ask for another partition or QOS"),
}


def is_fruitful(entry: Mapping[str, Any]) -> bool:
    """Returns whether an attempt brought the run on: by a commit where checkpoints are known, else by a step."""
    first, last = entry.get("first_committed"), entry.get("last_committed")
    if first is not None and last is not None:
        # Fewer after a rollback, which has a limit of its own.
        return bool(first != last)
    return int(entry.get("last_step") or 0) > int(entry.get("first_step") or 0)


def fruitless_ends(ledger: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Returns how many attempts in a row have ended in vain, by kind: "failed", "time_limit", "file_system", ..."""
    counts: Counter[str] = Counter()
    for entry in reversed(ledger):
        if "end_time_unix_s" not in entry:
            continue
        if is_fruitful(entry) or entry.get("action") == "stop":
            break
        counts[_KINDS.get(str(entry.get("reason")), "failed")] += 1
    return counts


def with_end(counts: Mapping[str, int], reason: str) -> Counter[str]:
    """Returns the counts with one more attempt that ended in vain."""
    return Counter(counts) + Counter([_KINDS.get(reason, "failed")])


def used_up(counts: Mapping[str, int], *, reason: str, max_returns: int, course: str) -> str:
    """Returns in words why a run is not to come back again after such an end, "" where it may.

    Args:
        counts: as `fruitless_ends` gives them, this end included.
        reason: what ended the newest attempt.
        max_returns: `requeue.max_fruitless_returns`.
        course: how that attempt went, from `course_of`; "" if that is not known.
    """
    kind = _KINDS.get(reason, "")
    if kind not in _WEIGHTS or counts.get(kind, 0) < max_returns * _WEIGHTS[kind]:
        return ""
    what, advice = _WORDS[kind]
    details = f" ({course})" if course else ""
    return f"{counts[kind]} {what} in a row without a new checkpoint{details}: {advice}; `resume` tries again"


def course_of(entry: Mapping[str, Any]) -> str:
    """Returns how long an attempt ran, and how much of it before its first step, "" where that is not known."""
    begin, end = entry.get("time_unix_s"), entry.get("end_time_unix_s")
    if begin is None or end is None:
        return ""
    before_s = sum(float(entry.get(cause) or 0.0) for cause in ("start_s", "rendezvous_s", "load_s", "compile_s"))
    first = f", {before_s:.0f} s of it before its first step" if before_s else ""
    return f"the last attempt ran {float(end) - float(begin):.0f} s{first}"


def starts_in_vain(ledger: Sequence[Mapping[str, Any]], *, job_id: str | None, restart_count: int) -> int:
    """Returns how many starts of a job in a row, this one included, could not even write what an attempt needs.

    Args:
        ledger: the run's; starts that could write nothing at all are not in it, but Slurm has counted them.
        job_id: the job.
        restart_count: how often Slurm had restarted it when this start began.
    """
    known = [int(entry.get("restart_count") or 0) for entry in ledger if entry.get("job_id") == job_id]
    without_trace = restart_count - max(known, default=-1)
    return max(without_trace, 0) + fruitless_ends(ledger)["file_system"]
