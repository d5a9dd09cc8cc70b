"""`devcluster`: a real Slurm on this one machine, for trying and testing, not for work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.tools.devcluster.cluster import (
    admit_users,
    bring_up,
    crash_node,
    require_root,
    start_node,
    state_lock,
    stop_node,
    tear_down,
)
from slurm_train.tools.devcluster.daemons import cluster_status
from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.verbs import parse


def main(words: Sequence[str]) -> int:
    """Carries out one `devcluster` command and returns its exit code.

    Raises:
        ClusterError: the command cannot be done here; its text says why.
    """
    arguments = parse("devcluster", words)
    arguments.state = Path(arguments.state).resolve()
    return _ACTIONS[arguments.action](arguments)


def _up(arguments: argparse.Namespace) -> int:
    require_root("up")
    plan = ClusterPlan(arguments.nodes, arguments.gpus, arguments.state)
    started = time.monotonic()
    if not bring_up(plan, users=arguments.user, say=note):
        note(f"already up: {plan.describe()}; state in {plan.state_dir}")
        return EXIT_DONE
    note(f"up: {plan.describe()} in {time.monotonic() - started:.1f} s; all nodes idle")
    note(f"next: python -m slurm_train +cluster={plan.nodes}x{plan.gpus}   (or: srun --nodes={plan.nodes} hostname)")
    return EXIT_DONE


def _down(arguments: argparse.Namespace) -> int:
    require_root("down")
    with state_lock(arguments.state):
        removed = tear_down(arguments.state)
    note(f"down: nothing left of {arguments.state}" if removed else f"nothing is up in {arguments.state}")
    return EXIT_DONE


def _status(arguments: argparse.Namespace) -> int:
    status = cluster_status(arguments.state)
    if status is None:
        note(f"nothing is up in {arguments.state}; python -m slurm_train devcluster up")
        return EXIT_FAILURE
    print(status.describe())
    return EXIT_DONE if status.is_healthy else EXIT_FAILURE


def _add_user(arguments: argparse.Namespace) -> int:
    require_root("add-user")
    admit_users(arguments.state, names=arguments.user)
    note(f"may submit: {', '.join(arguments.user)}")
    return EXIT_DONE


def _kill_node(arguments: argparse.Namespace) -> int:
    require_root("kill-node")
    end = crash_node if arguments.with_jobs else stop_node
    end(arguments.state, node=arguments.node)
    note(f"killed on {arguments.node}: {'everything' if arguments.with_jobs else 'slurmd'}")
    return EXIT_DONE


def _start_node(arguments: argparse.Namespace) -> int:
    require_root("start-node")
    start_node(arguments.state, node=arguments.node)
    note(f"{arguments.node} is back")
    return EXIT_DONE


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "add-user": _add_user,
    "kill-node": _kill_node,
    "start-node": _start_node,
}
