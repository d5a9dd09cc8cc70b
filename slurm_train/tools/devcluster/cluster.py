"""Builds a real Slurm on this machine, removes it completely, and kills or revives one node of it.

`up` builds over nothing that others made; `down` removes a cluster in whatever state it is: whole, half built,
half dead, or after a reboot.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import secrets
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import write_atomic
from slurm_train.rundir.removal import remove_tree
from slurm_train.tools.devcluster import system
from slurm_train.tools.devcluster.plan import (
    CONTROLLER,
    NULL_DEVICE,
    SYSTEM_SLURM_CONF,
    ClusterPlan,
    configuration,
    load_plan,
)
from slurm_train.tools.devcluster.system import RESTART_HINT, ProcessRecord, run_command

APT_LINE = (
    "apt-get install --no-install-recommends slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2"
)
# Program -> the Debian package that has it.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "ip": "iproute2",
}
# Name of the file that says that /run/netns was a mount before us and stays one.
_NETNS_KEPT = "netns-mount-kept"
_SYSTEM_NSSWITCH = Path("/etc/nsswitch.conf")

_ACCOUNT = "dev"
_FIRST_HUMAN_UID = 1000
# A node that lost its jobs in a crash stays "completing" for a while, and takes new ones.
_USABLE_STATES = frozenset({"idle", "mixed", "allocated", "completing"})
# How each daemon is run, and a command that ends with 0 once it answers. slurmdbd and slurmctld have a host name of
# their own; the machine's name does not change. A node has no route to a name server: every look-up beyond /etc/hosts
# would only wait (torch warns about each). `ip netns exec` gives the node a mount namespace of its own, so nobody else
# sees its nsswitch.conf.
_DAEMONS = {
    "munged": (
        "munged --foreground --socket={state}/run/munge.socket --key-file={conf}/munge.key "
        "--pid-file={state}/run/munged.pid --seed-file={state}/spool/munged.seed --log-file={state}/log/munged.log",
        "munge --no-input --socket={state}/run/munge.socket",
    ),
    "mariadbd": (
        "mariadbd --defaults-file={conf}/mariadb.cnf",
        "mariadb-admin --no-defaults --socket={state}/run/mariadb.socket ping",
    ),
    "slurmdbd": ("unshare --uts sh -c 'hostname {controller}; exec slurmdbd -D'", "sacctmgr --noheader show cluster"),
    "slurmctld": (
        "unshare --uts sh -c 'hostname {controller}; exec slurmctld -D -f {conf}/slurm.conf'",
        "scontrol ping",
    ),
    "slurmd": (
        "ip netns exec {node} unshare --uts sh -c 'hostname {host}; "
        "[ ! -e /etc/nsswitch.conf ] || mount --bind {conf}/nsswitch.conf /etc/nsswitch.conf; "
        "[ ! -e {conf}/node.sh ] || . {conf}/node.sh; "
        "exec slurmd -D -N {slurm_name} -f {conf}/slurm.conf'",
        "",
    ),
}
# Cluster, account and two QOS, of which urgent preempts normal; before slurmctld's first start. Associations are
# enforced: without that, Slurm 22.05 accepts a job whose QOS does not exist.
_ACCOUNTING = (
    "add cluster devcluster",
    "add qos urgent preempt=normal priority=1000",
    "modify qos normal set gracetime=15 preemptmode=requeue",
    f"add account {_ACCOUNT} cluster=devcluster qos=normal,urgent defaultqos=normal",
)

Say = Callable[[str], None]
"""Takes one line for the user."""


def bring_up(plan: ClusterPlan, *, users: Sequence[str] = (), say: Say = lambda _: None) -> bool:
    """Builds the cluster of a plan and returns when all its nodes are idle.

    Args:
        plan: the cluster.
        users: users that may submit, added to root and every person of this machine.
        say: gets one line per step.

    Returns:
        Whether anything had to be built; False where this very cluster was up and healthy.

    Raises:
        ClusterError: a requirement is missing, a cluster of another shape is up, or a step failed; in the last case
            everything has been removed again, and the message quotes the log of the daemon concerned.
    """
    missing = missing_packages()
    if missing:
        raise ClusterError(f"devcluster up needs packages that are not here: {', '.join(missing)}", hint=APT_LINE)
    with state_lock(plan.state_dir):
        if _is_up(plan):
            add_users(plan, names=users)
            return False
        if load_plan(plan.state_dir) is not None:
            say(f"remove what is left of an earlier cluster in {plan.state_dir}")
            tear_down(plan.state_dir)
        require_free_place(plan)
        umask = os.umask(0o022)  # users must be able to read slurm.conf and the plan, whatever root's umask is
        try:
            _build(plan, users=users, say=say)
        except BaseException:
            say("failed: removing what was built")
            try:
                tear_down(plan.state_dir)
            except ClusterError as err:
                say(f"not everything could be removed: {err}")  # the failure of the build is the error to raise
            raise
        finally:
            os.umask(umask)
    return True


def tear_down(state_dir: Path) -> bool:
    """Ends every process of a cluster, jobs included, and removes all that it made.

    Returns:
        Whether there was anything to remove.

    Raises:
        ClusterError: a process does not end, or the directory is not a cluster's state.
    """
    plan = load_plan(state_dir)
    hosts = system.marked_hosts(system.read_hosts())
    names = plan.node_names if plan else _nodes_left(state_dir, hosts)
    begun = (state_dir / "plan.json").exists()
    holds_files = state_dir.is_dir() and any(state_dir.iterdir())
    # Daemons of a cluster whose directory was removed under them write into it anew.
    if holds_files and not begun and not system.find_marked(state_dir):
        raise ClusterError(f"{state_dir} is not the state of a cluster; nothing removed", hint="give its --state")

    def processes() -> list[system.ProcessRecord]:
        records = map(system.read_record, (state_dir / "pid").glob("*"))
        recorded = [record for record in records if record is not None and record.is_alive()]
        return [*recorded, *system.find_marked(state_dir), *system.processes_inside(names)]

    system.end_processes(processes)
    if not (names or begun or _is_our_link(state_dir) or state_dir.is_dir()):
        return False
    if names:
        system.remove_network(names)
        if not (state_dir / _NETNS_KEPT).exists():
            system.remove_namespace_mount()
    system.update_hosts({}, state_dir=state_dir)
    if _is_our_link(state_dir):
        SYSTEM_SLURM_CONF.unlink()
    if state_dir.is_dir():
        # The plan goes last, so that an interrupted removal can be typed again.
        for entry in sorted(state_dir.iterdir(), key=lambda entry: entry.name == "plan.json"):
            remove_tree(entry)
        state_dir.rmdir()
    return True


def _nodes_left(state_dir: Path, hosts: Mapping[str, Path]) -> list[str]:
    """Returns the nodes of a cluster whose plan is gone: a machine holds one, so all links of nodes are its own."""
    if state_dir not in hosts.values():
        return []
    named = [name for name in hosts if hosts[name] == state_dir and name[:4] == "node"]
    prefix = system.host_link("")
    return sorted({*named, *(link.removeprefix(prefix) for link in system.links() if link.startswith(prefix))})


@contextmanager
def state_lock(state_dir: Path, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Keeps two commands from building and removing at once; leaves no file behind.

    Raises:
        ClusterError: another command still holds the lock after so many seconds.
    """
    state_dir.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state_dir.parent, os.O_RDONLY | os.O_DIRECTORY)

    def is_locked() -> bool:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    try:
        if not system.wait_until(is_locked, timeout_s=timeout_s):
            raise ClusterError("another devcluster command is running", hint="wait for it, then type this again")
        yield
    finally:
        os.close(descriptor)


def admit_users(state_dir: Path, *, names: Sequence[str]) -> None:
    """Lets users that were made after `up` submit jobs.

    Raises:
        ClusterError: no cluster is up, or this machine has no such user.
    """
    add_users(_require_plan(state_dir), names=names)


def stop_node(state_dir: Path, *, node: str) -> None:
    """Kills the slurmd of a node and leaves its jobs' processes running, as a hung node daemon does."""
    record = daemon_process(_require_plan(state_dir, node), f"slurmd-{node}")
    if record is not None and record.is_alive():
        system.end_processes(lambda: [record])


def crash_node(state_dir: Path, *, node: str) -> None:
    """Kills every process on a node at once, as a power cut does."""
    _require_plan(state_dir, node)
    system.end_processes(lambda: system.processes_inside((node,)))


def start_node(state_dir: Path, *, node: str) -> None:
    """Starts the slurmd of a node unless it runs, and waits until slurmctld counts it as usable.

    Raises:
        ClusterError: no such node, or it is not usable within 30 s.
    """
    plan = _require_plan(state_dir, node)
    start_daemon(plan, f"slurmd-{node}")
    wait_for_nodes(plan, [node])


def daemon_names(plan: ClusterPlan) -> list[str]:
    """Returns the names of the daemons that a plan keeps alive, in the order of their start: ..., "slurmd-node1"."""
    names = [name for name in list(_DAEMONS)[:-1] if name not in plan.habit.ended]
    return [*names, *(f"slurmd-{node}" for node in plan.node_names)]


def start_daemon(plan: ClusterPlan, name: str, *, timeout_s: float = 60.0) -> None:
    """Starts a daemon unless it runs, and waits until it answers.

    Raises:
        ClusterError: it ended or did not answer in time; quotes the end of its log.
    """
    kind, _, node = name.partition("-")
    names = {"state": plan.state_dir, "conf": plan.conf_dir, "controller": CONTROLLER, "node": node}
    if node:
        slurm_name, host, _ = (plan.called(template)[node] for template in plan.habit.names)
        names |= {"slurm_name": slurm_name, "host": host}
    # Nothing to quote: a plan refuses other paths.
    words, probe = (shlex.split(text.format(**names)) for text in _DAEMONS[kind])
    if not is_running(plan, name):
        log = plan.state_dir / "log" / f"{name}.err"
        system.spawn_daemon(words, record=plan.state_dir / "pid" / name, log=log, extra=plan.environment)

    def answers_or_ended() -> bool:
        return not is_running(plan, name) or system.succeeds(probe, extra=plan.environment)

    if probe and not system.wait_until(answers_or_ended, timeout_s=timeout_s):
        raise daemon_error(plan, name, f"did not answer within {timeout_s:.0f} s")
    if not is_running(plan, name):
        raise daemon_error(plan, name, "ended right after its start")


def daemon_process(plan: ClusterPlan, name: str) -> ProcessRecord | None:
    """Returns the recorded process of a daemon, None where it never started."""
    return system.read_record(plan.state_dir / "pid" / name)


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


def add_users(plan: ClusterPlan, *, names: Sequence[str]) -> None:
    """Lets users submit; those who may already stay as they are.

    Raises:
        ClusterError: a user does not exist on this machine.
    """
    unknown = sorted(set(names) - {entry.pw_name for entry in pwd.getpwall()})
    if unknown:
        raise ClusterError(f"no such user on this machine: {', '.join(unknown)}", hint="useradd NAME makes one")
    if not plan.uses_accounting or (plan.ready_file.exists() and "slurmdbd" in plan.habit.ended):
        return
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

    system.wait_until(is_settled, timeout_s=timeout_s)
    for name in unusable():
        state = _node_states(plan).get(name, "unknown")
        raise daemon_error(plan, f"slurmd-{name}", f"did not become idle within {timeout_s:.0f} s (sinfo: {state})")


def _node_states(plan: ClusterPlan) -> dict[str, str]:
    """Returns node -> state; empty where slurmctld does not answer."""
    words = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T"]
    try:
        text = run_command(words, extra=plan.environment, timeout_s=10)
    except ClusterError:
        return {}
    states = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    names = plan.called(plan.habit.names.slurm)
    return {node: states[name] for node, name in names.items() if name in states}


def missing_packages(search_path: str = system.SYSTEM_PATH) -> list[str]:
    """Returns the Debian packages of which a program is not on the search path."""
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=search_path) is None]


def missing_here() -> str:
    """Returns what this machine lacks for a cluster, in words; "" where nothing."""
    lacking = [] if os.geteuid() == 0 else ["root"]
    packages = missing_packages()
    if packages:
        lacking.append(f"packages {', '.join(packages)}")
    return " and ".join(lacking)


def require_root(verb: str) -> None:
    """Checks that this user may make namespaces.

    Raises:
        ClusterError: not root.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            f"devcluster {verb} needs root (network namespaces, device files); this is uid {os.geteuid()}",
            hint="type the same with sudo; packages it needs: " + APT_LINE,
        )


def require_free_place(plan: ClusterPlan) -> None:
    """Checks that nothing on this machine is in the way of a cluster.

    Raises:
        ClusterError: there is a slurm.conf, namespace, bridge, host name, route or directory that others made.
    """
    hosts = system.read_hosts()
    state_dir = plan.state_dir
    other_places = ", ".join(sorted({str(path) for path in system.marked_hosts(hosts).values() if path != state_dir}))
    names = system.namespaces() | system.links() | system.names_of_others(hosts)
    taken = ", ".join(sorted(names & {*plan.addresses, *plan.hosts, system.BRIDGE}))
    route = system.overlapping_route(plan)
    closed = [str(parent) for parent in state_dir.parents if parent.exists() and not parent.stat().st_mode & 0o001]
    obstacles = (
        (
            other_places,
            f"a cluster with its state in {other_places} is up; one machine holds one",
            f"python -m slurm_train devcluster down --state {other_places}",
        ),
        (
            os.path.lexists(SYSTEM_SLURM_CONF) and not _is_our_link(state_dir),
            f"{SYSTEM_SLURM_CONF} exists and is not ours: this machine seems to belong to a cluster",
            "use a machine without Slurm's configuration, or move that file away",
        ),
        (taken, f"names in use on this machine: {taken}", "remove or rename them first"),
        (
            route,
            f"the network {plan.subnet}.0/24 is in use on this machine: {route}",
            "take that network down (a VPN, another bridge), or use another machine",
        ),
        (
            state_dir.exists() and (not state_dir.is_dir() or any(state_dir.iterdir())),
            f"{state_dir} exists and is not a cluster's state",
            "give another --state",
        ),
        (
            closed,
            f"other users cannot enter {''.join(closed[-1:])}, so they could not read {state_dir}/etc/slurm.conf",
            "give a --state that every user can reach",
        ),
    )
    for is_there, message, hint in obstacles:
        if is_there:
            raise ClusterError(message, hint=hint)


def require_own(directory: Path) -> None:
    """Checks that no other user prepared a directory or may write it: root's daemons read what is in it.

    Raises:
        ClusterError: another user owns it or may write to it, or it is a link.
    """
    status = directory.lstat()
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_open:
        raise ClusterError(
            f"{directory} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}: others could write "
            "the configuration of root's daemons",
            hint="remove it, or name another place",
        )


def _is_up(plan: ClusterPlan) -> bool:
    status = cluster_status(plan.state_dir)
    if status is None or not status.is_complete or not any(status.daemons.values()):
        return False
    if status.plan != plan:
        raise ClusterError(
            f"asked for {plan.describe()}, but a cluster of {status.plan.describe()} is up",
            hint=f"python -m slurm_train devcluster down --state {plan.state_dir}",
        )
    if not status.is_healthy:
        raise ClusterError(
            f"this cluster is up but not healthy:\n{status.describe()}",
            hint="`devcluster start-node NAME` revives a node; `devcluster down` and `up` rebuild everything",
        )
    return True


def _build(plan: ClusterPlan, *, users: Sequence[str], say: Say) -> None:
    had_mount = system.is_namespace_mount()
    plan.state_dir.mkdir(parents=True, exist_ok=True)
    require_own(plan.state_dir)
    if had_mount:
        (plan.state_dir / _NETNS_KEPT).touch()
    # Before anything outside the directory is touched: `down` works from the plan.
    write_atomic(plan.plan_file, plan.json_text(), mode=0o644)
    say(f"configuration, {plan.gpus} GPU devices per node, munge key -> {plan.state_dir}")
    _write_configuration(plan)
    say(f"bridge {system.BRIDGE} and namespaces {', '.join(plan.node_names)}")
    system.update_hosts(plan.hosts, state_dir=plan.state_dir)
    system.build_network(plan)
    _run_lines(plan, "before.sh")
    start_daemon(plan, "munged")
    if plan.uses_accounting:
        say("mariadbd, slurmdbd: accounting")
        _start_accounting(plan, users=users)
    say(f"slurmctld and {plan.nodes} slurmd")
    for name in ("slurmctld", *(f"slurmd-{node}" for node in plan.node_names)):
        start_daemon(plan, name)
    wait_for_nodes(plan, plan.node_names)
    _run_lines(plan, "after.sh")
    processes = [daemon_process(plan, name) for name in plan.habit.ended]
    ended = [process for process in processes if process is not None]
    system.end_processes(lambda: ended)
    # Every user's plain `sbatch` finds the cluster by this link.
    SYSTEM_SLURM_CONF.parent.mkdir(parents=True, exist_ok=True)
    if not SYSTEM_SLURM_CONF.is_symlink():
        SYSTEM_SLURM_CONF.symlink_to(plan.slurm_conf)
    write_atomic(plan.ready_file, "", durable=False, mode=0o644)


def _start_accounting(plan: ClusterPlan, *, users: Sequence[str]) -> None:
    # Root signs in to the database by its uid, over the socket, without a password.
    install = ["mariadb-install-db", f"--defaults-file={plan.conf_dir}/mariadb.cnf", "--skip-test-db"]
    run_command([*install, "--auth-root-authentication-method=socket"], extra=plan.environment, timeout_s=120)
    for name in ("mariadbd", "slurmdbd"):
        start_daemon(plan, name)
    for words in _ACCOUNTING:
        _sacctmgr(plan, *words.split())
    # `nobody`, and those whom Debian numbers as persons.
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid >= _FIRST_HUMAN_UID]
    add_users(plan, names=list(dict.fromkeys(["root", *users, *people])))


def _run_lines(plan: ClusterPlan, name: str) -> None:
    """Runs the shell lines of a habit, which are a file of the configuration."""
    script = plan.conf_dir / name
    if script.exists():
        run_command(["sh", "-e", str(script)], extra=plan.environment)


def _write_configuration(plan: ClusterPlan) -> None:
    """Makes the directories, every configuration file, the munge key and the GPU devices."""
    for name in ("etc", "log", "pid", "run", "spool", "devices", "database"):
        (plan.state_dir / name).mkdir(mode=0o700 if name == "database" else 0o777, exist_ok=True)
    nsswitch = _SYSTEM_NSSWITCH.read_text() if _SYSTEM_NSSWITCH.exists() else ""
    # "slurm-wlm 24.11.5" from Debian, "slurm 24.11.5" from others; sinfo would want a configuration first.
    version = tuple(int(number) for number in re.findall(r"\d+", run_command(["slurmctld", "-V"]))[:2])
    for name, text in configuration(plan, nsswitch=nsswitch, slurm=version).items():
        # slurmdbd refuses a configuration that others can read.
        mode = 0o600 if name == "slurmdbd.conf" else 0o644
        write_atomic(plan.conf_dir / name, text, durable=False, mode=mode)
    descriptor = os.open(plan.conf_dir / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(1024))
    major, minor = plan.habit.gpu_numbers
    for index in range(plan.gpus):
        path = plan.state_dir / "devices" / f"gpu{index}"
        # /dev/null's numbers: a device that exists everywhere and harms nothing when a job opens its "GPU".
        device = os.makedev(major, minor if (major, minor) == NULL_DEVICE else minor + index)
        os.mknod(path, 0o666 | stat.S_IFCHR, device)
        path.chmod(0o666)


def _is_our_link(state_dir: Path) -> bool:
    return SYSTEM_SLURM_CONF.is_symlink() and SYSTEM_SLURM_CONF.readlink().is_relative_to(state_dir)


def _require_plan(state_dir: Path, node: str | None = None) -> ClusterPlan:
    """Returns the plan of the cluster that is up, which has the node."""
    plan = load_plan(state_dir)
    if plan is None:
        raise ClusterError(f"no cluster is up in {state_dir}", hint="python -m slurm_train devcluster up")
    if node is not None and node not in plan.node_names:
        raise ClusterError(f"no node {node!r} in this cluster", hint=f"one of {', '.join(plan.node_names)}")
    return plan
