"""What must be true before anything is built: root, the packages, and nobody else's things in the way."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import hosts, network
from slurm_train.tools.devcluster.commands import SYSTEM_PATH
from slurm_train.tools.devcluster.plan import SYSTEM_SLURM_CONF, ClusterPlan
from slurm_train.tools.devcluster.render import render_hosts

APT_LINE = (
    "apt-get install --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2"
)
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "ip": "iproute2",
}


def missing_packages(search_path: str = SYSTEM_PATH) -> list[str]:
    """Returns the Debian packages of which a program is not on the search path."""
    return [package for program, package in _PROGRAMS.items() if shutil.which(program, path=search_path) is None]


def missing_here() -> str:
    """Returns what this machine lacks for a cluster, in words; "" where nothing."""
    lacking = [] if os.geteuid() == 0 else ["root"]
    packages = missing_packages()
    if packages:
        lacking.append(f"packages {', '.join(packages)}")
    return " and ".join(lacking)


def require_root(verb: str) -> None:
    """Refuses a user who may not make namespaces.

    Raises:
        ClusterError: not root.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            f"devcluster {verb} needs root (network namespaces, device files); this is uid {os.geteuid()}",
            hint="type the same with sudo; packages it needs: " + APT_LINE,
        )


def require_packages() -> None:
    """Refuses a machine without the programs.

    Raises:
        ClusterError: packages are missing; the hint is the line that installs them.
    """
    missing = missing_packages()
    if missing:
        raise ClusterError(f"devcluster up needs packages that are not here: {', '.join(missing)}", hint=APT_LINE)


def require_free_place(plan: ClusterPlan) -> None:
    """Refuses to build over what somebody else made.

    Raises:
        ClusterError: a foreign slurm.conf, namespace, bridge, host name, route or directory; says which.
    """
    _require_no_other_cluster(plan)
    if os.path.lexists(SYSTEM_SLURM_CONF) and not is_our_link(plan.state_dir):
        raise ClusterError(
            f"{SYSTEM_SLURM_CONF} is there and is not ours: this machine seems to belong to a cluster",
            hint="use a machine without Slurm's configuration, or move that file away",
        )
    taken = sorted(set(plan.node_names) & network.list_namespaces())
    taken += [network.BRIDGE] if network.has_link(network.BRIDGE) else []
    taken += hosts.foreign_names(hosts.read_hosts(), names=render_hosts(plan))
    if taken:
        raise ClusterError(f"names in use on this machine: {', '.join(taken)}", hint="remove or rename them first")
    route = network.overlapping_route(plan)
    if route:
        raise ClusterError(
            f"the network {plan.subnet}.0/24 is in use here: {route}",
            hint="take that network down (a VPN, another bridge), or use another machine",
        )
    _require_usable_directory(plan.state_dir)


def is_our_link(state_dir: Path) -> bool:
    """Tells whether /etc/slurm/slurm.conf is a link into a state directory."""
    return SYSTEM_SLURM_CONF.is_symlink() and SYSTEM_SLURM_CONF.readlink().is_relative_to(state_dir)


def _require_no_other_cluster(plan: ClusterPlan) -> None:
    others = set(hosts.marked_hosts(hosts.read_hosts()).values()) - {plan.state_dir}
    if others:
        other = min(others)
        raise ClusterError(
            f"a cluster with its state in {other} is up; one machine holds one",
            hint=f"python -m slurm_train devcluster down --state {other}",
        )


def _require_usable_directory(state_dir: Path) -> None:
    if state_dir.exists() and (not state_dir.is_dir() or any(state_dir.iterdir())):
        raise ClusterError(f"{state_dir} is there and is not a cluster's state", hint="give another --state")
    closed = [parent for parent in state_dir.parents if parent.exists() and not parent.stat().st_mode & 0o001]
    if closed:
        raise ClusterError(
            f"other users cannot enter {closed[-1]}, so they could not read {state_dir}/etc/slurm.conf",
            hint="give a --state that every user can reach",
        )
