"""`devcluster`: a real Slurm on this one machine, for trying and testing, not for work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.tools.devcluster import cluster
from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.verbs import parse


def main(words: Sequence[str]) -> int:
    """Carries out one `devcluster` command and returns its exit code.

    Raises:
        ClusterError: the command cannot be done here; its text says why.
    """
    arguments = parse("devcluster", words)
    action = arguments.action
    if action != "status":
        cluster.require_root(action)
    state = Path(arguments.state).resolve()
    if action == "status":
        return _status(state)
    if action == "up":
        _up(ClusterPlan(arguments.nodes, arguments.gpus, state), arguments.user)
    elif action == "down":
        with cluster.state_lock(state):
            removed = cluster.tear_down(state)
        note(f"down: nothing left of {state}" if removed else f"nothing is up in {state}")
    elif action == "add-user":
        cluster.admit_users(state, names=arguments.user)
        note(f"may submit: {', '.join(arguments.user)}")
    elif action == "kill-node":
        end = cluster.crash_node if arguments.with_jobs else cluster.stop_node
        end(state, node=arguments.node)
        note(f"killed on {arguments.node}: {'everything' if arguments.with_jobs else 'slurmd'}")
    else:
        cluster.start_node(state, node=arguments.node)
        note(f"{arguments.node} is back")
    return EXIT_DONE


def _up(plan: ClusterPlan, users: Sequence[str]) -> None:
    started = time.monotonic()
    if not cluster.bring_up(plan, users=users, say=note):
        note(f"already up: {plan.describe()}; state in {plan.state_dir}")
        return
    note(f"up: {plan.describe()} in {time.monotonic() - started:.1f} s; all nodes idle")
    note(f"next: python -m slurm_train +cluster={plan.nodes}x{plan.gpus}   (or: srun --nodes={plan.nodes} hostname)")


def _status(state: Path) -> int:
    status = cluster.cluster_status(state)
    if status is None:
        note(f"nothing is up in {state}; python -m slurm_train devcluster up")
        return EXIT_FAILURE
    print(status.describe())
    return EXIT_DONE if status.is_healthy else EXIT_FAILURE
