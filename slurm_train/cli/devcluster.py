"""`devcluster`: a real Slurm on this one machine, for trying and testing, not for work."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE
from slurm_train.tools.devcluster import cluster, root
from slurm_train.tools.devcluster.plan import ClusterPlan, combined
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
    if "slurm" in arguments and arguments.slurm:
        return _in_root(root.find_root(arguments.slurm), arguments)
    state = Path(arguments.state).resolve()
    if action == "status":
        return _status(state)
    if action == "up":
        _up(ClusterPlan(arguments.nodes, arguments.gpus, state, site=_habits(arguments)), arguments.user)
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


def _habits(arguments: Namespace) -> tuple[str, ...]:
    return tuple(arguments.site.split(",")) if arguments.site else ()


def _in_root(its_root: root.Root, arguments: Namespace) -> int:
    """Carries out what was typed with --slurm."""
    if arguments.action == "exec":
        return root.enter(its_root, arguments.command)
    with cluster.state_lock(its_root.folder / "init"):
        if arguments.action == "up":
            return _up_in_root(its_root, arguments)
        was_up = root.stop(its_root)
    kept = f"; its packages stay in {its_root.tree}" if its_root.tree.exists() else ""
    note(f"{'down: nothing left' if was_up else 'nothing is up'} in the root of Debian {its_root}{kept}")
    return EXIT_DONE


def _up_in_root(its_root: root.Root, arguments: Namespace) -> int:
    combined(_habits(arguments))
    was_up = its_root.init() is not None
    root.start(its_root, say=note)
    users = (word for name in arguments.user for word in ("--user", name))
    shape = ["--nodes", str(arguments.nodes), "--gpus", str(arguments.gpus), "--state", arguments.state]
    shape += ["--site", arguments.site] if arguments.site else []
    code = root.enter(its_root, [sys.executable, "-m", "slurm_train", "devcluster", "up", *shape, *users])
    if code == EXIT_DONE:
        note(f"commands there: python -m slurm_train devcluster exec --slurm {its_root} -- COMMAND")
    elif not was_up:
        root.stop(its_root)
    return code


def _status(state: Path) -> int:
    status = cluster.cluster_status(state)
    if status is None:
        note(f"nothing is up in {state}; python -m slurm_train devcluster up")
        return EXIT_FAILURE
    print(status.describe())
    return EXIT_DONE if status.is_healthy else EXIT_FAILURE
