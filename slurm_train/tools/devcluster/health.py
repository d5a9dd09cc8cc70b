"""What is alive of a cluster: its daemons by their processes, its nodes by what slurmctld says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import run_command
from slurm_train.tools.devcluster.daemons import daemon_names, is_running, slurm_environment
from slurm_train.tools.devcluster.plan import ClusterPlan, load_plan

# A node that lost its jobs in a crash stays "completing" for a while, and takes new ones.
USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """State of a cluster at one moment."""

    plan: ClusterPlan
    is_complete: bool
    """`up` came to its end."""
    daemons: dict[str, bool]
    """Daemon name -> whether its process is alive."""
    nodes: dict[str, str]
    """Node name -> state as sinfo writes it, e.g. "idle" or "down*"; empty where slurmctld does not answer."""

    @property
    def is_healthy(self) -> bool:
        """All daemons are alive and all nodes take or do work."""
        usable = self.nodes.keys() == set(self.plan.node_names) and set(self.nodes.values()) <= USABLE_STATES
        return self.is_complete and usable and all(self.daemons.values())

    def describe(self) -> str:
        """Returns the status as lines for a person."""
        verdict = "healthy" if self.is_healthy else "NOT healthy" if self.is_complete else "half built"
        lines = [f"{self.plan.describe()}, {verdict}; state in {self.plan.state_dir}"]
        for name, alive in self.daemons.items():
            node = name.removeprefix("slurmd-")
            state = f"node {self.nodes.get(node, 'unknown')}" if node in self.plan.node_names else ""
            lines.append(f"  {name:<14} {'alive' if alive else 'DEAD':<6} {state}".rstrip())
        return "\n".join(lines)


def cluster_status(state_dir: Path) -> ClusterStatus | None:
    """Returns what is alive of the cluster in a state directory, or None where there is none."""
    plan = load_plan(state_dir)
    if plan is None:
        return None
    daemons = {name: is_running(plan, name=name) for name in daemon_names(plan)}
    nodes = node_states(plan) if daemons["slurmctld"] else {}
    return ClusterStatus(plan, plan.ready_file.exists(), daemons, nodes)


def node_states(plan: ClusterPlan) -> dict[str, str]:
    """Returns node name -> state; empty where slurmctld gives no answer."""
    words = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
    try:
        text = run_command(words, extra=slurm_environment(plan), timeout_s=10)
    except ClusterError:
        return {}
    pairs = [line.split() for line in text.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
