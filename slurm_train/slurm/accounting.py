"""What sacctmgr prints about a user's associations and the QOS, as values. Pure text in, values out.

The database keeps names in lower case; a site without accounting prints nothing, and nothing is guessed for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_train.slurm.partitions import parse_time_limit_min
from slurm_train.slurm.preemption import duration_s

ASSOCIATION_FORMAT = "DefaultAccount,Cluster,Account,Partition,QOS,DefaultQOS"
QOS_FORMAT = "Name,Priority,GraceTime,Preempt,PreemptMode,MaxWall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """An account that a user may charge, on a cluster."""

    cluster: str
    account: str
    is_default: bool
    """Whether Slurm takes it where a job names none."""
    partition: str = ""
    """The one partition that it is for; "" for all."""
    qos: tuple[str, ...] = ()
    """Names that a job may ask for; empty where the site says nothing."""
    default_qos: str = ""
    """What a job gets that asks for none; "" where the site says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """A quality of service."""

    name: str
    priority: int = 0
    grace_s: float = 0.0
    """From the first TERM of a preemption to the last."""
    preempts: tuple[str, ...] = ()
    """The QOS whose jobs it may preempt."""
    preempt_mode: str = ""
    """What becomes of its jobs when they are preempted, e.g. "requeue"; "cluster": the cluster's PreemptMode."""
    max_time_min: int | None = None
    """Longest time limit in minutes; None if unlimited."""


def parse_associations(text: str) -> list[Association]:
    """Returns the rows of `sacctmgr -n -P show user where name=... withassoc format=ASSOCIATION_FORMAT`."""
    found = []
    for default, cluster, account, partition, qos, default_qos in _rows(text, ASSOCIATION_FORMAT):
        if account:
            found.append(
                Association(
                    cluster=cluster,
                    account=account,
                    is_default=account == default,
                    partition=partition,
                    qos=_names(qos),
                    default_qos=default_qos,
                )
            )
    return found


def parse_qos(text: str) -> list[Qos]:
    """Returns the rows of `sacctmgr -n -P show qos format=QOS_FORMAT`."""
    return [
        Qos(
            name=name,
            priority=int(priority) if priority.isdigit() else 0,
            grace_s=duration_s(grace) or 0.0,
            preempts=_names(preempts),
            preempt_mode=mode.lower(),
            max_time_min=parse_time_limit_min(max_wall) if max_wall else None,
        )
        for name, priority, grace, preempts, mode, max_wall in _rows(text, QOS_FORMAT)
        if name
    ]


def _rows(text: str, columns: str) -> list[list[str]]:
    rows = (line.split("|") for line in text.splitlines())
    return [row for row in rows if len(row) == columns.count(",") + 1]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
