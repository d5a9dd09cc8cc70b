"""The daemons of a plan: what each is called with, when it is ready, and what its log said when it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import AFRESH_HINT, succeeds, wait_until
from slurm_train.tools.devcluster.plan import CONTROLLER, ClusterPlan
from slurm_train.tools.devcluster.processes import last_lines, mark_environment, read_record, spawn_daemon

CENTRAL = ("munged", "mariadbd", "slurmdbd", "slurmctld")


@dataclass(frozen=True, slots=True)
class Daemon:
    """One daemon of one cluster.

    `probe` is a command that ends with 0 as soon as the daemon answers; empty where there is none.
    """

    name: str
    words: tuple[str, ...]
    probe: tuple[str, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)


def central_daemon(plan: ClusterPlan, *, name: str) -> Daemon:
    """Returns one of the four daemons in the host's namespace: munged, mariadbd, slurmdbd, slurmctld."""
    return _CENTRAL_DAEMONS[name](plan)


def node_daemon(plan: ClusterPlan, *, node: str) -> Daemon:
    """Returns the slurmd of a node, in the node's network namespace and under the node's host name."""
    # A node has no route to a name server: every look-up beyond /etc/hosts would only wait (torch warns about each).
    # `ip netns exec` gave the node a mount namespace of its own, so nobody else sees this.
    names = f"[ ! -e /etc/nsswitch.conf ] || mount --bind {plan.conf_dir}/nsswitch.conf /etc/nsswitch.conf"
    command = f"sh -c '{names}; exec slurmd -D -N {node} -f {plan.slurm_conf}'"
    words = ("ip", "netns", "exec", node, *_under_host_name(node, command))
    return Daemon(f"slurmd-{node}", words, extra=slurm_environment(plan))


def slurm_environment(plan: ClusterPlan) -> dict[str, str]:
    """Returns the variables that point Slurm's commands to this cluster, and mark them as its processes."""
    return {**mark_environment(plan.state_dir), "SLURM_CONF": str(plan.slurm_conf)}


def start_daemon(plan: ClusterPlan, *, daemon: Daemon, timeout_s: float = 20.0) -> None:
    """Starts a daemon unless it runs, and waits until it answers.

    Raises:
        ClusterError: it ended or gave no answer in time; quotes the end of its log.
    """
    if not is_running(plan, name=daemon.name):
        spawn_daemon(
            daemon.words,
            record=record_path(plan, name=daemon.name),
            log=plan.log_dir / f"{daemon.name}.err",
            extra={**mark_environment(plan.state_dir), **daemon.extra},
        )

    def answers_or_ended() -> bool:
        return not is_running(plan, name=daemon.name) or (succeeds(daemon.probe, extra=daemon.extra))

    if daemon.probe and not wait_until(answers_or_ended, timeout_s=timeout_s):
        raise daemon_error(plan, name=daemon.name, what=f"gave no answer within {timeout_s:.0f} s")
    if not is_running(plan, name=daemon.name):
        raise daemon_error(plan, name=daemon.name, what="ended right after its start")


def is_running(plan: ClusterPlan, *, name: str) -> bool:
    """Tells whether a daemon's recorded process is alive."""
    record = read_record(record_path(plan, name=name))
    return record is not None and record.is_alive()


def daemon_error(plan: ClusterPlan, *, name: str, what: str) -> ClusterError:
    """Returns the error for a daemon that failed, with the last lines of its log."""
    log = log_path(plan, name=name)
    if not log.exists() or log.stat().st_size == 0:
        # It failed before it opened its log, or has none beside its stderr.
        log = log.with_suffix(".err")
    return ClusterError(f"{name} {what}; the end of {log}:\n{last_lines(log)}", hint=AFRESH_HINT)


def daemon_names(plan: ClusterPlan) -> tuple[str, ...]:
    """Returns the names of all daemons of a plan, in the order of their start."""
    return (*CENTRAL, *(f"slurmd-{node}" for node in plan.node_names))


def record_path(plan: ClusterPlan, *, name: str) -> Path:
    """Returns the file that names a daemon's process."""
    return plan.pid_dir / name


def log_path(plan: ClusterPlan, *, name: str) -> Path:
    """Returns a daemon's log."""
    return plan.log_dir / f"{name}.log"


def _munged(plan: ClusterPlan) -> Daemon:
    options = (
        f"--key-file={plan.conf_dir}/munge.key",
        f"--socket={plan.munge_socket}",
        f"--pid-file={plan.run_dir}/munged.pid",
        f"--seed-file={plan.spool_dir}/munged.seed",
        f"--log-file={log_path(plan, name='munged')}",
    )
    probe = ("munge", "--no-input", f"--socket={plan.munge_socket}")
    return Daemon("munged", ("munged", "--foreground", *options), probe)


def _mariadbd(plan: ClusterPlan) -> Daemon:
    probe = ("mariadb-admin", "--no-defaults", f"--socket={plan.database_socket}", "ping")
    return Daemon("mariadbd", ("mariadbd", f"--defaults-file={plan.conf_dir}/mariadb.cnf"), probe)


def _slurmdbd(plan: ClusterPlan) -> Daemon:
    extra = {**slurm_environment(plan), "MYSQL_UNIX_PORT": str(plan.database_socket)}
    return Daemon(
        "slurmdbd", _under_host_name(CONTROLLER, "slurmdbd -D"), ("sacctmgr", "--noheader", "show", "cluster"), extra
    )


def _slurmctld(plan: ClusterPlan) -> Daemon:
    words = _under_host_name(CONTROLLER, f"slurmctld -D -f {plan.slurm_conf}")
    return Daemon("slurmctld", words, ("scontrol", "ping"), slurm_environment(plan))


def _under_host_name(name: str, command: str) -> tuple[str, ...]:
    """Returns the words that run a command under a host name of its own; the machine's name stays."""
    return ("unshare", "--uts", "sh", "-c", f"hostname {name}; exec {command}")


_CENTRAL_DAEMONS: dict[str, Callable[[ClusterPlan], Daemon]] = {
    "munged": _munged,
    "mariadbd": _mariadbd,
    "slurmdbd": _slurmdbd,
    "slurmctld": _slurmctld,
}
