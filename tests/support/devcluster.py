"""One-machine clusters for tests: with the habits of other sites, and with the Slurm of other Debian releases.

    python -m tests.support.devcluster up --site no-accounting
    python -m tests.support.devcluster up --slurm 22.05/b --site no-requeue,partition-cancel
    python -m tests.support.devcluster exec --slurm 22.05/b -- python -m slurm_train +cluster=2x2
    python -m tests.support.devcluster down --slurm 22.05/b

Without --slurm the cluster is this machine's: `slurm_train devcluster` says how it is, ends it and kills its nodes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError
from slurm_train.tools.devcluster import cluster
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan
from tests.support import cluster_roots
from tests.support.cluster_habits import HABITS, combined


def main(words: Sequence[str]) -> int:
    """Carries out one command and returns its exit code.

    Raises:
        ClusterError: the command cannot be done here; its text says why.
    """
    arguments = _parse(words)
    cluster.require_root(arguments.action)
    root = cluster_roots.find_root(arguments.slurm) if arguments.slurm else None
    if arguments.action == "exec":
        assert root is not None, "the parser requires --slurm"
        return cluster_roots.enter(root, arguments.command)
    if arguments.action == "down":
        return _down(root)
    if root is None:
        return _up(arguments)
    with cluster.state_lock(root.folder / "init"):
        return _up_in_root(root, arguments)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    habits = "\n".join(f"  {name:<18} {habit.about}" for name, habit in HABITS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.devcluster",
        description=__doc__,
        epilog=f"habits of other sites:\n{habits}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up")
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--gpus", type=int, default=8)
    up.add_argument("--user", action="append", default=[])
    up.add_argument("--site", default="", help="habits, separated by commas")
    up.add_argument("--slurm", default="", help="version or Debian suite, e.g. 24.11, trixie, trixie/second")
    down = actions.add_parser("down")
    down.add_argument("--slurm", default="")
    run = actions.add_parser("exec")
    run.add_argument("--slurm", required=True)
    run.add_argument("command", nargs="+", help="write -- before it")
    return parser.parse_args(list(words))


def _habits(arguments: argparse.Namespace) -> list[str]:
    return arguments.site.split(",") if arguments.site else []


def _up(arguments: argparse.Namespace) -> int:
    plan = ClusterPlan(arguments.nodes, arguments.gpus, DEFAULT_STATE_DIR, habit=combined(_habits(arguments)))
    is_new = cluster.bring_up(plan, users=arguments.user, say=_say)
    _say(f"{'up' if is_new else 'already up'}: {plan.describe()}; state in {plan.state_dir}")
    return EXIT_DONE


def _down(root: cluster_roots.Root | None) -> int:
    if root is None:
        with cluster.state_lock(DEFAULT_STATE_DIR):
            was_up = cluster.tear_down(DEFAULT_STATE_DIR)
        _say("down: nothing left" if was_up else "nothing is up")
        return EXIT_DONE
    with cluster.state_lock(root.folder / "init"):
        was_up = cluster_roots.stop(root)
    kept = f"; its packages stay in {root.tree}" if root.tree.exists() else ""
    _say(f"{'down: nothing left' if was_up else 'nothing is up'} in the root of Debian {root}{kept}")
    return EXIT_DONE


def _up_in_root(root: cluster_roots.Root, arguments: argparse.Namespace) -> int:
    # Refused before packages are installed.
    combined(_habits(arguments))
    was_up = root.init() is not None
    cluster_roots.start(root, say=_say)
    words = [sys.executable, "-m", "tests.support.devcluster", "up"]
    words += ["--nodes", str(arguments.nodes), "--gpus", str(arguments.gpus)]
    if arguments.site:
        words += ["--site", arguments.site]
    for user in arguments.user:
        words += ["--user", user]
    code = cluster_roots.enter(root, words)
    if code == EXIT_DONE:
        _say(f"commands there: python -m tests.support.devcluster exec --slurm {root} -- COMMAND")
    elif not was_up:
        cluster_roots.stop(root)
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClusterError as err:
        _say(f"error: {err}")
        sys.exit(EXIT_FAILURE)
