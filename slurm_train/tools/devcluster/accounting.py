"""The accounting of the cluster: one account, two QOS of which one preempts the other, and who may submit.

Associations are enforced: without that, Slurm 22.05 accepts a job whose QOS does not exist.
"""

from __future__ import annotations

import pwd
from collections.abc import Sequence

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import run_command
from slurm_train.tools.devcluster.daemons import slurm_environment
from slurm_train.tools.devcluster.plan import ClusterPlan

CLUSTER = "devcluster"
ACCOUNT = "dev"
GRACE_S = 15
_FIRST_HUMAN_UID = 1000


def register_cluster(plan: ClusterPlan, *, users: Sequence[str]) -> None:
    """Registers cluster, account, QOS and users; must be done before slurmctld starts the first time."""
    _sacctmgr(plan, "add", "cluster", CLUSTER)
    _sacctmgr(plan, "add", "qos", "urgent", "preempt=normal", "priority=1000")
    _sacctmgr(plan, "modify", "qos", "normal", "set", f"gracetime={GRACE_S}", "preemptmode=requeue")
    _sacctmgr(plan, "add", "account", ACCOUNT, f"cluster={CLUSTER}", "qos=normal,urgent", "defaultqos=normal")
    add_users(plan, names=users)


def add_users(plan: ClusterPlan, *, names: Sequence[str]) -> None:
    """Lets users submit; those who may already stay as they are.

    Raises:
        ClusterError: a user does not exist on this machine.
    """
    known = {entry.pw_name for entry in pwd.getpwall()}
    strangers = sorted(set(names) - known)
    if strangers:
        raise ClusterError(f"no such user on this machine: {', '.join(strangers)}", hint="useradd NAME makes one")
    listed = _sacctmgr(plan, "--noheader", "--parsable2", "show", "associations", f"account={ACCOUNT}", "format=user")
    missing = [name for name in names if name not in listed.split()]
    if missing:
        _sacctmgr(plan, "add", "user", ",".join(missing), f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}")


def users_to_register(asked: Sequence[str]) -> tuple[str, ...]:
    """Returns root, the users asked for, and every person of this machine, each once.

    People are those that Debian numbers as such (uid 1000 and up), and `nobody`.
    """
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid >= _FIRST_HUMAN_UID]
    return tuple(dict.fromkeys(["root", *asked, *people]))


def _sacctmgr(plan: ClusterPlan, *words: str) -> str:
    return run_command(["sacctmgr", "--immediate", "--quiet", *words], extra=slurm_environment(plan))
