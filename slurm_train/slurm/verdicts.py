"""What `sbatch --test-only` says about a script, in plain words. Pure text in, values out."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

_ESTIMATE = re.compile(
    # A heterogeneous job's line has neither "nodes" nor the partition.
    r"to start at (?P<start>\S+) using .* on (?:nodes )?(?P<nodes>\S+)(?: in partition (?P<partition>\S+))?"
)
_PREFIX = re.compile(r"^(?:sbatch: )?(?:error: |fatal: )?(?:allocation failure: |Batch job submission failed: )?")


class Refusal(enum.Enum):
    """Why Slurm would not take a script; the value is the advice for it."""

    PARTITION = "see `sinfo` for the partitions you may use and set cluster.partition"
    QOS = "see `sacctmgr show qos` for the names you may use and set cluster.qos"
    ACCOUNT = "see `sacctmgr show associations user=$USER` and set cluster.account"
    RESOURCES = (
        "no set of nodes has that much: lower cluster.nodes, cluster.gpus_per_node, CPUs or memory (see `sinfo -N -l`)"
    )
    TIME_LIMIT = "lower cluster.time_limit_min (`sinfo -o '%P %l'` shows the longest)"
    POLICY = "your account or QOS allows less: ask for less, or for another QOS"
    NODE_NAME = "see `sinfo -N` for the names and set cluster.nodelist or cluster.exclude"
    FEATURE = "see `sinfo -o '%N %f'` for the features and set cluster.sbatch.constraint"
    RESERVATION = "see `scontrol show reservation` and set cluster.sbatch.reservation"
    OPTION = "look up the option in `man sbatch` and set cluster.sbatch.<flag>"
    OTHER = "run `sbatch --test-only` on the script by hand"


# Searched in order in the lower-cased text: the first that occurs decides.
_NEEDLES = (
    # First: its explanation mentions time limits too.
    ("accounting/qos policy", Refusal.POLICY),
    ("partition name", Refusal.PARTITION),
    ("invalid partition", Refusal.PARTITION),
    ("not permitted to use this partition", Refusal.PARTITION),
    ("invalid qos", Refusal.QOS),
    ("invalid account", Refusal.ACCOUNT),
    ("time limit", Refusal.TIME_LIMIT),
    ("--time specification", Refusal.TIME_LIMIT),
    ("invalid node name", Refusal.NODE_NAME),
    ("feature specification", Refusal.FEATURE),
    ("reservation", Refusal.RESERVATION),
    ("node configuration is not available", Refusal.RESOURCES),
    ("partition configuration not available", Refusal.RESOURCES),
    ("node count", Refusal.RESOURCES),
    ("more processors", Refusal.RESOURCES),
    ("generic resource", Refusal.RESOURCES),
    ("gres", Refusal.RESOURCES),
    ("memory specification", Refusal.RESOURCES),
    ("option", Refusal.OPTION),
    ("specification", Refusal.OPTION),
    ("directive", Refusal.OPTION),
    ("unmatched", Refusal.OPTION),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TestVerdict:
    """Whether Slurm would take a script now, and when it would start it."""

    __test__ = False

    is_accepted: bool
    start: str = ""
    """Estimated start, e.g. "2026-01-31T09:41:24"; "" if refused or not told."""
    nodelist: str = ""
    """Nodes that it would use, in compact form."""
    partition: str = ""
    refusal: Refusal | None = None
    """None if accepted."""
    message: str = ""
    """Slurm's own words for the refusal."""


def read_verdict(return_code: int, text: str) -> TestVerdict:
    """Returns what exit code and stderr of `sbatch --test-only` mean."""
    if return_code == 0:
        match = _ESTIMATE.search(text)
        if match is None:
            return TestVerdict(is_accepted=True)
        return TestVerdict(
            is_accepted=True, start=match["start"], nodelist=match["nodes"], partition=match["partition"] or ""
        )
    message = _message(text)
    return TestVerdict(is_accepted=False, refusal=_refusal(message), message=message)


def _message(text: str) -> str:
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("Try ")]
    return "; ".join(said[-2:]) or "sbatch gave no reason"


def _refusal(message: str) -> Refusal:
    lowered = message.lower()
    return next((refusal for needle, refusal in _NEEDLES if needle in lowered), Refusal.OTHER)
