"""Brings a real Slurm up on this machine, and kills or revives one node of it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import write_atomic
from slurm_train.tools.devcluster import accounting, files, hosts, network
from slurm_train.tools.devcluster.commands import wait_until
from slurm_train.tools.devcluster.daemons import (
    central_daemon,
    daemon_error,
    is_running,
    node_daemon,
    record_path,
    start_daemon,
)
from slurm_train.tools.devcluster.health import USABLE_STATES, cluster_status, node_states
from slurm_train.tools.devcluster.plan import ClusterPlan, load_plan
from slurm_train.tools.devcluster.processes import end_processes, read_record
from slurm_train.tools.devcluster.render import render_hosts
from slurm_train.tools.devcluster.requirements import require_free_place, require_packages
from slurm_train.tools.devcluster.teardown import NETNS_KEPT, tear_down

_IDLE_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 60.0


def _silent(_: str) -> None:
    """Says nothing; the default for callers that are not a terminal."""


def bring_up(plan: ClusterPlan, *, users: Sequence[str] = (), say: Callable[[str], None] = _silent) -> bool:
    """Builds the cluster of a plan and returns when all its nodes are idle.

    Args:
        plan: the cluster.
        users: users that may submit, beside root and every person of this machine.
        say: gets one line per step.

    Returns:
        Whether anything had to be built; False where this very cluster was up and healthy.

    Raises:
        ClusterError: a requirement is missing, a cluster of another shape is up, or a step failed; in the last case
            everything has been taken away again, and the message quotes the log of the daemon concerned.
    """
    require_packages()
    with state_lock(plan.state_dir):
        if _is_up(plan):
            accounting.add_users(plan, names=users)
            return False
        _clear_remains(plan, say=say)
        require_free_place(plan)
        try:
            with _readable_by_all():
                _build(plan, users=users, say=say)
        except BaseException:
            _undo(plan, say=say)
            raise
    return True


@contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """Keeps two commands from building and removing at once; leaves no file behind.

    Raises:
        ClusterError: another command still works on it after a minute.
    """
    state_dir.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state_dir.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not wait_until(lambda: _try_lock(descriptor), timeout_s=_LOCK_TIMEOUT_S):
            raise ClusterError("another devcluster command is at work", hint="wait for it, then type this again")
        yield
    finally:
        os.close(descriptor)


def admit_users(state_dir: Path, *, names: Sequence[str]) -> None:
    """Lets users that were made after `up` submit jobs.

    Raises:
        ClusterError: no cluster is up, or this machine has no such user.
    """
    accounting.add_users(_require_plan(state_dir), names=names)


def stop_node(state_dir: Path, *, node: str) -> None:
    """Kills the slurmd of a node and leaves its jobs' processes running, as a hung node daemon does."""
    plan = _plan_with_node(state_dir, node)
    record = read_record(record_path(plan, name=f"slurmd-{node}"))
    if record is not None and record.is_alive():
        end_processes(lambda: [record])


def crash_node(state_dir: Path, *, node: str) -> None:
    """Kills every process on a node at once, as a power cut does."""
    _plan_with_node(state_dir, node)
    end_processes(lambda: network.processes_inside((node,)))


def start_node(state_dir: Path, *, node: str, timeout_s: float = _IDLE_TIMEOUT_S) -> None:
    """Starts the slurmd of a node unless it runs, and waits until slurmctld counts it as usable.

    Raises:
        ClusterError: no such node, or it does not come back within `timeout_s` seconds.
    """
    plan = _plan_with_node(state_dir, node)
    start_daemon(plan, daemon=node_daemon(plan, node=node))
    _wait_for_nodes(plan, names=(node,), timeout_s=timeout_s)


def _is_up(plan: ClusterPlan) -> bool:
    status = cluster_status(plan.state_dir)
    if status is None or not status.is_complete:
        return False
    alive = any(status.daemons.values())
    if alive and status.plan != plan:
        raise ClusterError(
            f"asked for {plan.describe()}, but a cluster of {status.plan.describe()} is up",
            hint=f"python -m slurm_train devcluster down --state {plan.state_dir}",
        )
    if alive and not status.is_healthy:
        raise ClusterError(
            f"this cluster is up but not healthy:\n{status.describe()}",
            hint="`devcluster start-node NAME` revives a node; `devcluster down` and `up` build everything anew",
        )
    return alive


def _clear_remains(plan: ClusterPlan, *, say: Callable[[str], None]) -> None:
    """Removes a cluster that was half built or did not survive a reboot."""
    if load_plan(plan.state_dir) is not None:
        say(f"remove the remains of an earlier cluster in {plan.state_dir}")
        tear_down(plan.state_dir)


def _undo(plan: ClusterPlan, *, say: Callable[[str], None]) -> None:
    """Takes a failed build away; what cannot go is said, so that the failure itself stays the error."""
    say("failed: taking away what was built")
    try:
        tear_down(plan.state_dir)
    except ClusterError as err:
        say(f"not everything went: {err}")


@contextmanager
def _readable_by_all() -> Iterator[None]:
    """Lets users read slurm.conf and the plan, whatever the umask of the root who typed `up`."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def _build(plan: ClusterPlan, *, users: Sequence[str], say: Callable[[str], None]) -> None:
    had_mount = network.is_namespace_mount()
    plan.state_dir.mkdir(parents=True, exist_ok=True)
    files.require_own(plan.state_dir)
    if had_mount:
        (plan.state_dir / NETNS_KEPT).touch()
    # Before anything outside the directory is touched: `down` works from the plan.
    write_atomic(plan.plan_file, plan.json_text(), mode=0o644)
    say(f"configuration, {plan.gpus} GPU devices per node, munge key -> {plan.state_dir}")
    files.write_configuration(plan)
    say(f"bridge {network.BRIDGE} ({plan.controller_address}) and namespaces {plan.nodelist}")
    hosts.write_hosts(hosts.with_hosts(hosts.read_hosts(), names=render_hosts(plan), state_dir=plan.state_dir))
    network.build_network(plan)
    _start_daemons(plan, users=users, say=say)
    files.link_slurm_conf(plan)
    write_atomic(plan.ready_file, "", durable=False, mode=0o644)


def _start_daemons(plan: ClusterPlan, *, users: Sequence[str], say: Callable[[str], None]) -> None:
    say("munged, mariadbd, slurmdbd: authentication and accounting")
    start_daemon(plan, daemon=central_daemon(plan, name="munged"))
    files.create_database(plan)
    start_daemon(plan, daemon=central_daemon(plan, name="mariadbd"))
    start_daemon(plan, daemon=central_daemon(plan, name="slurmdbd"))
    accounting.register_cluster(plan, users=accounting.users_to_register(users))
    say(f"slurmctld and {plan.nodes} slurmd")
    start_daemon(plan, daemon=central_daemon(plan, name="slurmctld"))
    for node in plan.node_names:
        start_daemon(plan, daemon=node_daemon(plan, node=node))
    _wait_for_nodes(plan, names=plan.node_names, timeout_s=_IDLE_TIMEOUT_S)


def _wait_for_nodes(plan: ClusterPlan, *, names: Sequence[str], timeout_s: float) -> None:
    def unusable() -> list[str]:
        states = node_states(plan)
        return [name for name in names if states.get(name) not in USABLE_STATES]

    def is_settled() -> bool:
        return not unusable() or not all(is_running(plan, name=f"slurmd-{name}") for name in names)

    wait_until(is_settled, timeout_s=timeout_s)
    for name in unusable():
        what = f"did not become idle within {timeout_s:.0f} s (sinfo says {node_states(plan).get(name, 'nothing')})"
        raise daemon_error(plan, name=f"slurmd-{name}", what=what)


def _require_plan(state_dir: Path) -> ClusterPlan:
    plan = load_plan(state_dir)
    if plan is None:
        raise ClusterError(f"no cluster is up in {state_dir}", hint="python -m slurm_train devcluster up")
    return plan


def _plan_with_node(state_dir: Path, node: str) -> ClusterPlan:
    plan = _require_plan(state_dir)
    if node not in plan.node_names:
        raise ClusterError(f"no node {node!r} in this cluster", hint=f"one of {', '.join(plan.node_names)}")
    return plan


def _try_lock(descriptor: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
