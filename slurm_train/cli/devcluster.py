"""`python -m slurm_train devcluster`: a real Slurm on this one machine, for trying and testing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan

_EXAMPLES = """\
examples:
  python -m slurm_train devcluster up --nodes 4 --gpus 8
  srun --nodes=4 hostname
  python -m slurm_train +cluster=4x8
  python -m slurm_train devcluster kill-node node2      # slurmd dies; the node is down 20 s later
  python -m slurm_train devcluster start-node node2
  python -m slurm_train devcluster down
"""


def main(words: list[str]) -> int:
    """Carries out one `devcluster` command and returns its exit code.

    Raises:
        ClusterError: the command cannot be done here; its text says why.
        SystemExit: with 2, after a usage message, where the words are wrong.
    """
    arguments = _parser().parse_args(words)
    return _HANDLERS[arguments.verb](arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train devcluster",
        description="A real Slurm on this one machine: for trying and testing, not for work.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--state", type=_state_dir, default=DEFAULT_STATE_DIR, help="directory that holds all of it")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", parents=[common], help="build the cluster and wait until its nodes are idle")
    up.add_argument("--nodes", type=int, default=4, help="nodes (default 4)")
    up.add_argument("--gpus", type=int, default=8, help="GPU devices per node (default 8)")
    up.add_argument("--user", action="append", default=[], help="a further user who may submit; may be repeated")
    verbs.add_parser("down", parents=[common], help="end its jobs and remove all of it")
    verbs.add_parser("status", parents=[common], help="daemons and nodes; exit code 0 if healthy, else 1")
    add = verbs.add_parser("add-user", parents=[common], help="let a user who came after `up` submit jobs")
    add.add_argument("user", nargs="+", help="a user of this machine")
    kill = verbs.add_parser("kill-node", parents=[common], help="kill the slurmd of a node")
    kill.add_argument("node", help="e.g. node2")
    kill.add_argument("--with-jobs", action="store_true", help="kill every process on the node, as a power cut does")
    start = verbs.add_parser("start-node", parents=[common], help="start the slurmd of a node again")
    start.add_argument("node", help="e.g. node2")
    return parser


def _state_dir(word: str) -> Path:
    return Path(word).resolve()


def _up(arguments: argparse.Namespace) -> int:
    require_root("up")
    plan = ClusterPlan(arguments.nodes, arguments.gpus, arguments.state)
    started = time.monotonic()
    if not bring_up(plan, users=arguments.user, say=_say):
        _say(f"already up: {plan.describe()}; state in {plan.state_dir}")
        return EXIT_DONE
    _say(f"up: {plan.describe()} in {time.monotonic() - started:.1f} s; all nodes idle")
    _say(f"next: python -m slurm_train +cluster={plan.nodes}x{plan.gpus}   (or: srun --nodes={plan.nodes} hostname)")
    return EXIT_DONE


def _down(arguments: argparse.Namespace) -> int:
    require_root("down")
    with state_lock(arguments.state):
        removed = tear_down(arguments.state)
    _say(f"down: nothing left of {arguments.state}" if removed else f"nothing is up in {arguments.state}")
    return EXIT_DONE


def _status(arguments: argparse.Namespace) -> int:
    status = cluster_status(arguments.state)
    if status is None:
        _say(f"nothing is up in {arguments.state}; python -m slurm_train devcluster up")
        return EXIT_FAILURE
    print(status.describe())
    return EXIT_DONE if status.is_healthy else EXIT_FAILURE


def _add_user(arguments: argparse.Namespace) -> int:
    require_root("add-user")
    admit_users(arguments.state, names=arguments.user)
    _say(f"may submit: {', '.join(arguments.user)}")
    return EXIT_DONE


def _kill_node(arguments: argparse.Namespace) -> int:
    require_root("kill-node")
    end = crash_node if arguments.with_jobs else stop_node
    end(arguments.state, node=arguments.node)
    _say(f"killed on {arguments.node}: {'everything' if arguments.with_jobs else 'slurmd'}")
    return EXIT_DONE


def _start_node(arguments: argparse.Namespace) -> int:
    require_root("start-node")
    start_node(arguments.state, node=arguments.node)
    _say(f"{arguments.node} is back")
    return EXIT_DONE


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_HANDLERS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "add-user": _add_user,
    "kill-node": _kill_node,
    "start-node": _start_node,
}
