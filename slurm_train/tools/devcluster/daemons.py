"""The daemons of a plan: how each is started and probed, who may submit, and which daemons and nodes are alive."""

from __future__ import annotations

import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.plan import CONTROLLER, ClusterPlan, load_plan
from slurm_train.tools.devcluster.system import (
    RESTART_HINT,
    ProcessRecord,
    read_record,
    run_command,
    spawn_daemon,
    succeeds,
    wait_until,
)

_ACCOUNT = "dev"
_FIRST_HUMAN_UID = 1000
# A node that lost its jobs in a crash stays "completing" for a while, and takes new ones.
_USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})


def daemon_names(plan: ClusterPlan) -> tuple[str, ...]:
    """Returns the names of all daemons of a plan in the order of their start: "munged", ..., "slurmd-node1"."""
    return ("munged", "mariadbd", "slurmdbd", "slurmctld", *(f"slurmd-{node}" for node in plan.node_names))


def _command_and_probe(plan: ClusterPlan, name: str) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the words that run a daemon, and a command that ends with 0 once it answers (none for slurmd)."""
    state, conf, munge_socket = plan.state_dir, plan.conf_dir, f"--socket={plan.state_dir}/run/munge.socket"
    if name == "munged":
        files = [f"--key-file={conf}/munge.key", f"--pid-file={state}/run/munged.pid"]
        files += [f"--seed-file={state}/spool/munged.seed", f"--log-file={state}/log/munged.log"]
        return ("munged", "--foreground", munge_socket, *files), ("munge", "--no-input", munge_socket)
    if name == "mariadbd":
        probe = ("mariadb-admin", "--no-defaults", f"--socket={state}/run/mariadb.socket", "ping")
        return ("mariadbd", f"--defaults-file={conf}/mariadb.cnf"), probe
    if name == "slurmdbd":
        return _with_host_name(CONTROLLER, "slurmdbd -D"), ("sacctmgr", "--noheader", "show", "cluster")
    if name == "slurmctld":
        return _with_host_name(CONTROLLER, f"slurmctld -D -f {plan.slurm_conf}"), ("scontrol", "ping")
    node = name.removeprefix("slurmd-")
    # A node has no route to a name server: every look-up beyond /etc/hosts would only wait (torch warns about each).
    # `ip netns exec` gave the node a mount namespace of its own, so nobody else sees this.
    names = f"[ ! -e /etc/nsswitch.conf ] || mount --bind {conf}/nsswitch.conf /etc/nsswitch.conf"
    command = f"sh -c '{names}; exec slurmd -D -N {node} -f {plan.slurm_conf}'"
    return ("ip", "netns", "exec", node, *_with_host_name(node, command)), ()


def _with_host_name(name: str, command: str) -> tuple[str, ...]:
    """Returns the words that run a command with a host name of its own; the machine's name does not change."""
    return ("unshare", "--uts", "sh", "-c", f"hostname {name}; exec {command}")


def start_daemon(plan: ClusterPlan, name: str, *, timeout_s: float = 20.0) -> None:
    """Starts a daemon unless it runs, and waits until it answers.

    Raises:
        ClusterError: it ended or did not answer in time; quotes the end of its log.
    """
    words, probe = _command_and_probe(plan, name)
    if not is_running(plan, name):
        log = plan.state_dir / "log" / f"{name}.err"
        spawn_daemon(words, record=plan.state_dir / "pid" / name, log=log, extra=plan.environment)

    def answers_or_ended() -> bool:
        return not is_running(plan, name) or succeeds(probe, extra=plan.environment)

    if probe and not wait_until(answers_or_ended, timeout_s=timeout_s):
        raise daemon_error(plan, name, f"did not answer within {timeout_s:.0f} s")
    if not is_running(plan, name):
        raise daemon_error(plan, name, "ended right after its start")


def daemon_process(plan: ClusterPlan, name: str) -> ProcessRecord | None:
    """Returns the recorded process of a daemon, None where it never started."""
    return read_record(plan.state_dir / "pid" / name)


def is_running(plan: ClusterPlan, name: str) -> bool:
    """Returns whether a daemon's recorded process is alive."""
    process = daemon_process(plan, name)
    return process is not None and process.is_alive()


def daemon_error(plan: ClusterPlan, name: str, problem: str) -> ClusterError:
    """Returns the error for a daemon that failed, with the last six lines of its log."""
    log = plan.state_dir / "log" / f"{name}.log"
    if not log.exists() or log.stat().st_size == 0:
        # It failed before it opened its log, or has none but its stderr.
        log = log.with_suffix(".err")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    end = "\n".join(f"    {line}" for line in lines[-6:] or ["(empty)"])
    return ClusterError(f"{name} {problem}; the end of {log}:\n{end}", hint=RESTART_HINT)


def register_cluster(plan: ClusterPlan, *, users: Sequence[str]) -> None:
    """Registers cluster, account, users and two QOS, of which urgent preempts normal; before slurmctld's first start.

    Associations are enforced: without that, Slurm 22.05 accepts a job whose QOS does not exist. Root and every person
    of this machine may submit, too: `nobody`, and those whom Debian numbers as such (uid 1000 and up).
    """
    _sacctmgr(plan, "add", "cluster", "devcluster")
    _sacctmgr(plan, "add", "qos", "urgent", "preempt=normal", "priority=1000")
    _sacctmgr(plan, "modify", "qos", "normal", "set", "gracetime=15", "preemptmode=requeue")
    _sacctmgr(plan, "add", "account", _ACCOUNT, "cluster=devcluster", "qos=normal,urgent", "defaultqos=normal")
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid >= _FIRST_HUMAN_UID]
    add_users(plan, names=list(dict.fromkeys(["root", *users, *people])))


def add_users(plan: ClusterPlan, *, names: Sequence[str]) -> None:
    """Lets users submit; those who may already stay as they are.

    Raises:
        ClusterError: a user does not exist on this machine.
    """
    unknown = sorted(set(names) - {entry.pw_name for entry in pwd.getpwall()})
    if unknown:
        raise ClusterError(f"no such user on this machine: {', '.join(unknown)}", hint="useradd NAME makes one")
    listed = _sacctmgr(plan, "--noheader", "--parsable2", "show", "associations", f"account={_ACCOUNT}", "format=user")
    missing = [name for name in names if name not in listed.split()]
    if missing:
        _sacctmgr(plan, "add", "user", ",".join(missing), f"account={_ACCOUNT}", f"defaultaccount={_ACCOUNT}")


def _sacctmgr(plan: ClusterPlan, *words: str) -> str:
    return run_command(["sacctmgr", "--immediate", "--quiet", *words], extra=plan.environment)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """State of a cluster at one moment."""

    plan: ClusterPlan
    is_complete: bool
    """Whether `up` came to its end."""
    daemons: dict[str, bool]
    """Daemon name -> whether its process is alive."""
    nodes: dict[str, str]
    """Node name -> state as sinfo writes it, e.g. "idle" or "down*"; empty where slurmctld does not answer."""

    @property
    def is_healthy(self) -> bool:
        """Whether all daemons are alive and all nodes take or do work."""
        usable = self.nodes.keys() == set(self.plan.node_names) and set(self.nodes.values()) <= _USABLE_STATES
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
    """Returns which daemons and nodes of the cluster in a state directory are alive, or None where there is none."""
    plan = load_plan(state_dir)
    if plan is None:
        return None
    daemons = {name: is_running(plan, name) for name in daemon_names(plan)}
    nodes = _node_states(plan) if daemons["slurmctld"] else {}
    return ClusterStatus(plan, plan.ready_file.exists(), daemons, nodes)


def wait_for_nodes(plan: ClusterPlan, names: Sequence[str], *, timeout_s: float = 30.0) -> None:
    """Waits until slurmctld counts nodes as usable.

    Raises:
        ClusterError: a slurmd ended, or a node is not usable in time; quotes the end of its log.
    """

    def unusable() -> list[str]:
        states = _node_states(plan)
        return [name for name in names if states.get(name) not in _USABLE_STATES]

    def is_settled() -> bool:
        return not unusable() or not all(is_running(plan, f"slurmd-{name}") for name in names)

    wait_until(is_settled, timeout_s=timeout_s)
    for name in unusable():
        state = _node_states(plan).get(name, "unknown")
        raise daemon_error(plan, f"slurmd-{name}", f"did not become idle within {timeout_s:.0f} s (sinfo: {state})")


def _node_states(plan: ClusterPlan) -> dict[str, str]:
    """Returns node name -> state; empty where slurmctld does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
    try:
        text = run_command(words, extra=plan.environment, timeout_s=10)
    except ClusterError:
        return {}
    pairs = [line.split() for line in text.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
