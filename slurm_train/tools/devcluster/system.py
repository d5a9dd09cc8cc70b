"""What `devcluster` does to the machine: commands, daemons and their end, lines in /etc/hosts, network namespaces.

A daemon gets its own session, no descriptor of the caller, and a log file. Before it becomes the daemon, the process
writes its own id and start time, so a starter that is killed at any moment leaves a record; the pair names a process
uniquely, where an id alone is reused. A variable in its environment is the second way to find it.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import write_atomic
from slurm_train.slurm.commands import run_program
from slurm_train.tools.devcluster.plan import CONTROLLER, MARK, ClusterPlan

# A fixed search path: what the caller's shell put first must not replace a system tool that runs as root.
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
RESTART_HINT = "`devcluster status` shows which daemons are alive; `devcluster down`, then `up`, rebuilds the cluster"
BRIDGE = "slurmtrain0"
NODE_INTERFACE = "eth0"
_HOSTS = Path("/etc/hosts")
_HOSTS_MARK = "# slurm-train-devcluster"
_NAMESPACES = Path("/run/netns")
# $1 record, $2 log, then the daemon. The process id and the start time both survive the exec.
_RECORD_THEN_EXEC = (
    'cd /; umask 022; record=$1; exec </dev/null >>"$2" 2>&1; shift 2; '
    'echo "$$ $(cut -d" " -f22 /proc/$$/stat)" >"$record.new" && mv "$record.new" "$record" && exec "$@"'
)


def run_command(
    words: Sequence[str], *, extra: Mapping[str, str] | None = None, timeout_s: float = 30.0, text: str = ""
) -> str:
    """Returns the standard output of a command.

    Args:
        words: the command and its arguments.
        extra: variables added to the base environment, e.g. {"SLURM_CONF": "..."}.
        timeout_s: seconds after which the command is killed.
        text: its input.

    Raises:
        ClusterError: the command is missing, fails, or takes too long; quotes its last line on stderr.
    """
    environment = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/", **(extra or {})}
    try:
        done = run_program(words, env=environment, timeout_s=timeout_s, text=text)
    except FileNotFoundError as err:
        raise ClusterError(
            f"`{words[0]}` is not installed", hint="`devcluster up` lists the packages that it needs"
        ) from err
    except subprocess.TimeoutExpired as err:
        raise ClusterError(f"`{shlex.join(words)}` did not end within {timeout_s:.0f} s", hint=RESTART_HINT) from err
    if done.return_code != 0:
        raise ClusterError(
            f"`{shlex.join(words)}` failed with exit code {done.return_code}: {done.last_line}", hint=RESTART_HINT
        )
    return done.stdout


def succeeds(words: Sequence[str], *, extra: Mapping[str, str] | None = None) -> bool:
    """Returns whether a command ends with 0 within 5 s."""
    try:
        run_command(words, extra=extra, timeout_s=5.0)
    except ClusterError:
        return False
    return True


def wait_until(is_reached: Callable[[], bool], *, timeout_s: float, poll_s: float = 0.05) -> bool:
    """Polls until a condition holds; returns False if it does not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process, named so that no later process can be taken for it."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start, field 22 of /proc/PID/stat."""

    def is_alive(self) -> bool:
        """Returns whether this very process runs; a zombie does not."""
        return read_process(self.pid) == self


def spawn_daemon(
    words: Sequence[str], *, record: Path, log: Path, extra: Mapping[str, str], timeout_s: float = 5.0
) -> None:
    """Starts a daemon that survives the caller, and returns once its record is there.

    Args:
        words: the daemon and its arguments, in the foreground form.
        record: file that will name the process; an old one is replaced.
        log: file that gets stdout and stderr, appended.
        extra: environment added to the base, with `MARK` in it.
        timeout_s: seconds for the record to appear.

    Raises:
        ClusterError: the record did not appear, e.g. because the directory is not writable.
    """
    record.unlink(missing_ok=True)
    # --fork leaves no child behind: the daemon belongs to init, also where the caller is a long test session.
    run_command(["setsid", "--fork", "sh", "-c", _RECORD_THEN_EXEC, "sh", str(record), str(log), *words], extra=extra)
    if not wait_until(record.exists, timeout_s=timeout_s, poll_s=0.01):
        raise ClusterError(
            f"{record.stem} did not start: no record at {record} after {timeout_s:.0f} s",
            hint=f"check that {record.parent} is writable and the machine not too busy; {RESTART_HINT}",
        )


def read_record(path: Path) -> ProcessRecord | None:
    """Returns the process that a record names, or None where there is no record or only a part of one."""
    try:
        pid, start_ticks = path.read_text(encoding="ascii").split()
        return ProcessRecord(int(pid), int(start_ticks))
    except (FileNotFoundError, ValueError):
        return None


def read_process(pid: int) -> ProcessRecord | None:
    """Returns the process that has an id now, or None where none is alive."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else ProcessRecord(pid, int(fields[19]))


def find_marked(state_dir: Path) -> list[ProcessRecord]:
    """Returns the processes of this machine that were started with the mark of a cluster in their environment.

    A container's processes are seen here, too; the cluster that they are of is another one, in the container's files.
    """
    wanted = f"{MARK}={state_dir}".encode()
    own_space = Path("/proc/self/ns/pid").readlink()
    processes = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_marked = entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0")
            if is_marked and (entry / "ns/pid").readlink() == own_space:
                processes.append(read_process(int(entry.name)))
    return [process for process in processes if process is not None]


def end_processes(find: Callable[[], Iterable[ProcessRecord]], *, timeout_s: float = 10.0) -> None:
    """Kills what `find` returns, again and again until it returns nothing.

    All of them are stopped before the first is killed, so that none sees another one end: srun has a helper process
    that then cancels the step, which no machine does whose power is cut. The repetition catches a process that was
    forked between the look and the signal. The caller and its parents are spared, so `down` may be typed inside a node.

    Raises:
        ClusterError: processes are left after `timeout_s` seconds; names them.
    """
    spared = set(_own_and_parents())
    victims: list[ProcessRecord] = []
    stopped: set[ProcessRecord] = set()

    def send(number: signal.Signals, processes: Iterable[ProcessRecord]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill_round() -> bool:
        while True:
            victims[:] = [process for process in find() if process.pid not in spared and process.is_alive()]
            if stopped.issuperset(victims):
                break
            send(signal.SIGSTOP, victims)
            stopped.update(victims)
        send(signal.SIGKILL, victims)
        return not victims

    if not wait_until(kill_round, timeout_s=timeout_s):
        left = sorted(process.pid for process in victims)
        raise ClusterError(
            f"processes {left} did not end within {timeout_s:.0f} s", hint="see `ps` for them, then type this again"
        )


def _stat_fields(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on (field 3), or None where there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _own_and_parents() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        fields = _stat_fields(pid)
        pid = 0 if fields is None else int(fields[1])


def with_hosts(text: str, names: Mapping[str, str], *, state_dir: Path) -> str:
    """Returns the text of a hosts file with our lines at its end, old ones of ours removed.

    Each line carries a mark and the state directory, so that it is found again.

    Args:
        text: the file as it is.
        names: host name -> address; empty to remove our lines.
        state_dir: the cluster that the lines belong to.
    """
    kept = "".join(line for line in text.splitlines(keepends=True) if _HOSTS_MARK not in line)
    if names and kept and not kept.endswith("\n"):
        kept += "\n"
    return kept + "".join(f"{address}\t{name} {_HOSTS_MARK} {state_dir}\n" for name, address in names.items())


def marked_hosts(text: str) -> dict[str, Path]:
    """Returns host name -> state directory of our lines."""
    state_dirs = {}
    for line in text.splitlines():
        words, mark, state_dir = line.partition(_HOSTS_MARK)
        if mark and len(words.split()) == 2:
            state_dirs[words.split()[1]] = Path(state_dir.strip())
    return state_dirs


def names_of_others(text: str) -> set[str]:
    """Returns the names that those lines of a hosts file define that are not ours."""
    lines = (line.partition("#")[0] for line in text.splitlines() if _HOSTS_MARK not in line)
    return {word for line in lines for word in line.split()[1:]}


def read_hosts() -> str:
    """Returns the text of /etc/hosts, "" where there is none."""
    return _HOSTS.read_text(encoding="utf-8") if _HOSTS.exists() else ""


def update_hosts(names: Mapping[str, str], *, state_dir: Path) -> None:
    """Puts names (host name -> address) into /etc/hosts in place of all lines of ours."""
    before = read_hosts()
    text = with_hosts(before, names, state_dir=state_dir)
    if text == before:
        return
    # In a container the file is a mount point, which cannot be renamed over.
    if _HOSTS.is_mount():
        _HOSTS.write_text(text, encoding="utf-8")
    else:
        write_atomic(_HOSTS, text, mode=0o644)


_BRIDGE_SCRIPT = """\
ip link add {bridge} type bridge
ip address add {address} dev {bridge}
ip link set {bridge} up
"""
# c10d would try and warn about IPv6 on every connection; off before the interface comes up.
_NODE_SCRIPT = """\
ip netns add {node}
ip netns exec {node} sh -ec 'for one in all default; do echo {no_ipv6} >/proc/sys/net/ipv6/conf/$one/disable_ipv6; done'
ip link add {link} type veth peer name {interface} netns {node}
ip link set {link} master {bridge} up
ip -n {node} link set lo up
ip -n {node} address add {address} dev {interface}
ip -n {node} link set {interface} up
"""


def build_network(plan: ClusterPlan) -> None:
    """Makes one bridge, and for each node a network namespace with a veth on it; none of them may be there."""
    # Without a wait for others with the same address, in which it could not be used.
    length = "/64 nodad" if plan.habit.is_ipv6 else "/24"
    addresses = {name: f"{address}{length}" for name, address in plan.addresses.items()}
    script = _BRIDGE_SCRIPT.format(bridge=BRIDGE, address=addresses[CONTROLLER])
    for name in plan.node_names:
        names = {"node": name, "link": host_link(name), "interface": NODE_INTERFACE, "bridge": BRIDGE}
        script += _NODE_SCRIPT.format(**names, address=addresses[name], no_ipv6=int(not plan.habit.is_ipv6))
    run_command(["sh", "-e"], text=script)


def remove_network(names: Sequence[str]) -> None:
    """Removes the namespaces of nodes, their veths and the bridge, as far as they are there."""
    for name in sorted(set(names) & namespaces()):
        run_command(["ip", "netns", "delete", name])
    for link in sorted({BRIDGE, *map(host_link, names)} & links()):
        # A veth goes with its namespace, but the kernel may take its time.
        with suppress(ClusterError):
            run_command(["ip", "link", "delete", link])
    if BRIDGE in links():
        run_command(["ip", "link", "delete", BRIDGE])


def host_link(node: str) -> str:
    """Returns the host's end of a node's veth, e.g. "st-node1"."""
    return f"st-{node}"


def links() -> set[str]:
    """Returns the names of this machine's network interfaces."""
    return {name for _, name in socket.if_nameindex()}


def namespaces() -> set[str]:
    """Returns the names of all network namespaces of this machine."""
    return {entry.name for entry in _NAMESPACES.iterdir()} if _NAMESPACES.is_dir() else set()


def processes_inside(names: Sequence[str]) -> list[ProcessRecord]:
    """Returns every process in the nodes' namespaces: slurmd, slurmstepd and the ranks of jobs."""
    present = [name for name in names if name in namespaces()]
    processes = [
        read_process(int(pid)) for name in present for pid in run_command(["ip", "netns", "pids", name]).split()
    ]
    return [process for process in processes if process is not None]


def is_namespace_mount() -> bool:
    """Returns whether /run/netns is a mount; `ip netns add` makes it one the first time and never takes it away."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return any(line.split()[1] == str(_NAMESPACES) for line in mounts)


def remove_namespace_mount() -> None:
    """Unmounts and removes an empty /run/netns."""
    if namespaces():
        return
    while is_namespace_mount() and succeeds(["umount", str(_NAMESPACES)]):
        pass
    with suppress(OSError):
        _NAMESPACES.rmdir()


def overlapping_route(plan: ClusterPlan) -> str:
    """Returns the route of this machine that already covers the plan's subnet, or ""."""
    for line in run_command(["ip", "-4", "route", "show", "root", f"{plan.subnet}.0/24"]).splitlines():
        if f" dev {BRIDGE} " not in f"{line} ":
            return line.strip()
    return ""
