"""`torchrun RUN_DIR`: one node's launcher where `cluster.launcher=torchrun`; srun starts one on each node.

It runs torch's elastic agent and passes Slurm's signals for the step on to the ranks: under proctrack/cgroup no other
process of the step gets them. It ends with its step, and with the attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from slurm_train.config.frozen import load_config
from slurm_train.config.program import program_of
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.distributed.interfaces import interface_addresses
from slurm_train.distributed.master import chosen_address
from slurm_train.distributed.rendezvous import NodeRanks, run_ranks
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, EXIT_ORPHANED, EXIT_REQUEUE, EXIT_WRONG_USE, RunError
from slurm_train.rundir.attempts import has_successor, newest_round, was_saved
from slurm_train.rundir.events import FailureMark, first_mark, leave_mark, read_marks
from slurm_train.rundir.files import read_tail
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlannedWorld, PlanRecord
from slurm_train.session.signals import FENCE_EVERY_S, hold_stop_signals, next_stop_signal
from slurm_train.slurm.allocation import TaskPlace
from slurm_train.slurm.devices import visible_gpus
from slurm_train.slurm.pack_slot import enter_slot
from slurm_train.status.failure import last_words
from slurm_train.supervise.ranks import is_violent

_LOOK_EVERY_S = 0.5
_BY_SIGNAL = 128
"""A shell ends with this number plus that of the signal that has ended its program."""
_LOG_BYTES = 1 << 16


def main(words: Sequence[str]) -> NoReturn:
    """Runs this node's ranks and ends the process with 0 (done), 75 (saved), or a failure's code."""
    if len(words) != 1 or "SLURM_TRAIN_ATTEMPT" not in os.environ:
        raise RunError(
            f"torchrun is what a job starts on its nodes, found {list(words)}",
            hint='write +cluster=2x8, with cluster.launcher=torchrun; a script of yours: "script=[train.py,--flag]"',
        )
    # Before any thread exists: all threads, and the ranks until they install handlers, inherit the blocked signals.
    hold_stop_signals()
    run = RunDirectory(Path(words[0]))
    os.environ.update(enter_slot(os.environ))
    env = dict(os.environ)
    parent = os.getppid()
    attempt = int(env["SLURM_TRAIN_ATTEMPT"])
    config = load_config(run.config)
    node = node_ranks(run, config, env)
    codes: list[int] = []
    command = [sys.executable, "-u", "-m", "slurm_train", "worker", str(run.path)]
    on_failed = partial(leave_mark_for, run, attempt, host=node.host)
    thread = threading.Thread(
        target=lambda: codes.append(run_ranks(node, command, on_failed=on_failed)), name="agent", daemon=True
    )
    thread.start()
    sent_signals = _forward_signals(run, attempt, thread, parent=parent)
    agent_code = codes[0] if codes else EXIT_FAILURE
    _leave(outcome(run, config, attempt, agent_code, sent_signals=sent_signals))


def node_ranks(run: RunDirectory, config: RunConfig, env: Mapping[str, str]) -> NodeRanks:
    """Returns the ranks that this node starts, by what Slurm has granted.

    Raises:
        ClusterError: not a task of a step.
    """
    cluster = config.slurm
    task = TaskPlace.from_env(env)
    world = PlanRecord.read(run.plan).world
    return NodeRanks(
        run_id=f"{run.run_id}.{env['SLURM_TRAIN_ATTEMPT']}",
        num_nodes=task.world_size,
        node_rank=task.rank,
        host=env["SLURMD_NODENAME"],
        address=_own_address(cluster, env["SLURMD_NODENAME"]),
        num_ranks=granted_ranks(env, world, node=task.rank),
        endpoint=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
        max_restarts=cluster.max_restarts,
        timeout_s=config.train.start_timeout_s,
    )


def _own_address(cluster: ClusterSection, node: str) -> str:
    """Returns where the ranks would meet on this node, as rank 0's; its agent tells the others."""
    own = interface_addresses()
    return chosen_address(cluster, node, address_on=lambda name: own.get(name, "")) or node


def granted_ranks(env: Mapping[str, str], world: PlannedWorld, *, node: int) -> int:
    """Returns how many ranks a node gets: one for each GPU that Slurm has granted here, else the planned number.

    Args:
        env: environment of the task.
        world: of the run's plan.
        node: number of the node in rank order.
    """
    granted = env.get("SLURM_GPUS_ON_NODE", "")
    if granted.isdigit() and int(granted):
        return int(granted)
    gpus = visible_gpus(env)
    return len(gpus or ()) or world.ranks_per_node[node]


def _forward_signals(run: RunDirectory, attempt: int, agent: threading.Thread, *, parent: int) -> set[int]:
    """Passes signals on to the ranks until the agent has ended, and returns them.

    Ends the process if its parent has ended, or if the attempt is over.
    """
    sent_signals: set[int] = set()
    delivered: set[tuple[int, int]] = set()
    due_s = time.monotonic() + FENCE_EVERY_S
    while agent.is_alive():
        received = next_stop_signal(_LOOK_EVERY_S)
        if received is not None:
            sent_signals.add(received)
        # Ranks that were restarted meanwhile get the signals as well.
        for pid in children_of(os.getpid()):
            for number in sent_signals:
                if (pid, number) not in delivered:
                    _kill(pid, number)
                    delivered.add((pid, number))
        if os.getppid() != parent:
            _end_ranks(EXIT_ORPHANED, "the process that started it is gone (slurmstepd was killed?)")
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + FENCE_EVERY_S
            # If the file system refuses now, the next look tries again.
            with contextlib.suppress(OSError):
                newest = newest_round(run, attempt)
                if has_successor(run, newest):
                    _end_ranks(EXIT_FAILURE, f"attempt {newest} was overtaken by a newer one")
                mark = first_mark(run, newest)
                if mark is not None and mark.exit_code == EXIT_WRONG_USE:
                    # Wrong use fails in the same way again, so nothing is started again.
                    _end_ranks(EXIT_WRONG_USE, str(mark.cause))
    return sent_signals


def children_of(parent: int) -> list[int]:
    """Returns the ids of the processes whose parent has this id."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # The command name before the last ")" may contain blanks.
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(path.parent.name))
    return sorted(children)


def _end_ranks(code: int, reason: str) -> NoReturn:
    print(f"error: {reason}; the ranks of this node are ended", file=sys.stderr, flush=True)
    for pid in children_of(os.getpid()):
        _kill(pid, signal.SIGKILL)
    _leave(code)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def leave_mark_for(run: RunDirectory, attempt: int, rank: int, code: int, *, host: str) -> None:
    """Leaves the mark of a rank that has left none: a segmentation fault ended it, or `os._exit`, or it is no Python.

    Args:
        run: the run.
        attempt: the attempt at the start of the step.
        rank: the rank.
        code: its exit code, the negative number of the signal if one ended it; nothing is left of one that was asked to
            stop.
        host: the rank's node.
    """
    # If it cannot be written, what the rank has said is still in its log.
    with contextlib.suppress(OSError):
        newest = newest_round(run, attempt)
        if is_violent(code):
            words = signal.strsignal(-code) or f"signal {-code}"
            leave_mark(run, newest, FailureMark(rank=rank, host=host, exit_code=128 - code, message=words))
        elif 0 < code < _BY_SIGNAL and all(mark.rank != rank for mark in read_marks(run, newest)):
            last_line = last_words(read_tail(run.rank_log(newest, rank), _LOG_BYTES))
            words = f"ended with exit code {code}{f'; its last words: {last_line}' if last_line else ''}"
            leave_mark(run, newest, FailureMark(rank=rank, host=host, exit_code=code, message=words))


def outcome(run: RunDirectory, config: RunConfig, attempt: int, code: int, *, sent_signals: Collection[int]) -> int:
    """Returns the exit code of this node's task.

    Args:
        run: the run.
        config: its configuration.
        attempt: the attempt at the start of the step.
        code: exit code of the agent.
        sent_signals: signals that were passed on to the ranks.
    """
    if code != EXIT_DONE and not program_of(config).saves and signal.SIGUSR2 in sent_signals:
        # A script without a handler for the warning dies of it, and so do the scripts that are started after it.
        return 128 + signal.SIGUSR2
    # torchrun knows only success and failure; ranks that have saved and want to continue end with success.
    if code == EXIT_DONE and was_saved(run, newest_round(run, attempt)) and not run.result.exists():
        return EXIT_REQUEUE
    return code


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent's threads may wait for other nodes, and everything that matters is on disk.
    os._exit(code)
