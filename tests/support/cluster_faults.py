"""Faults of the one-machine cluster, caused for real and undone afterwards: daemons, nodes, network, mounts, QOS.

Mounts are made in the mount namespace of a node's slurmd, rules and routes in its network namespace; the other nodes
and this process see nothing of it.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from slurm_train.tools.devcluster.cluster import crash_node, daemon_process, start_daemon, start_node, stop_node
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, ClusterPlan, load_plan
from slurm_train.tools.devcluster.system import NODE_INTERFACE, host_link
from tests.support.slurm_runs import command, wait_for_state
from tests.support.waiting import wait_for


def cluster() -> ClusterPlan:
    """Returns the cluster that is up."""
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    return plan


# The controller and accounting


@contextmanager
def controller_away() -> Iterator[None]:
    """Kills slurmctld and starts it again at the end."""
    record = daemon_process(cluster(), "slurmctld")
    assert record is not None and record.is_alive(), "no slurmctld"
    os.kill(record.pid, signal.SIGKILL)
    wait_for(lambda: not record.is_alive(), within_s=60, what="the end of slurmctld")
    try:
        yield
    finally:
        start_daemon(cluster(), "slurmctld")


@contextmanager
def controller_set_back(job: str) -> Iterator[None]:
    """Kills slurmctld at the end, and starts it with its jobs and steps as they were at the beginning.

    So it comes back when it is killed before it has written what happened last.
    """
    lines = command("scontrol", "show", "config").splitlines()
    (place,) = (line.split("=")[1].strip() for line in lines if line.startswith("StateSaveLocation"))
    jobs = Path(place) / "job_state"
    begin_ns = jobs.stat().st_mtime_ns
    command("scontrol", "update", f"jobid={job}", "comment=written")
    wait_for(lambda: jobs.stat().st_mtime_ns > begin_ns, within_s=30, what=f"a new {jobs}")
    before = jobs.read_bytes()
    yield
    with controller_away():
        jobs.write_bytes(before)


@contextmanager
def kill_wait(seconds: int) -> Iterator[None]:
    """Gives what Slurm ends more time before it is killed; most sites have Slurm's default of 30 s."""
    conf = cluster().slurm_conf
    before = conf.read_text()
    try:
        conf.write_text(re.sub(r"(?m)^KillWait=.*$", f"KillWait={seconds}", before))
        command("scontrol", "reconfigure")
        yield
    finally:
        conf.write_text(before)
        command("scontrol", "reconfigure")


@contextmanager
def expedited_requeue() -> Iterator[None]:
    """Lets jobs ask for --requeue=expedite (25.11 and newer)."""
    word = "enable_expedited_requeue"
    conf = cluster().slurm_conf
    before = conf.read_text()

    def is_enabled() -> bool:
        return word in command("scontrol", "show", "config", must=False)

    try:
        conf.write_text(f"{before}\nSlurmctldParameters={word}\n")
        command("scontrol", "reconfigure")
        wait_for(is_enabled, within_s=60, what=word)
        yield
    finally:
        conf.write_text(before)
        command("scontrol", "reconfigure")
        wait_for(lambda: not is_enabled(), within_s=60, what=f"the end of {word}")


@contextmanager
def extra_qos(settings: Mapping[str, str]) -> Iterator[None]:
    """Adds QOS that everybody may use: by name what sacctmgr sets, e.g. {"weak": "gracetime=0 preemptmode=requeue"}."""
    names = ",".join(settings)
    try:
        for name, words in settings.items():
            # What an earlier run left behind is there already.
            _sacctmgr("add", "qos", name, must=False)
            _sacctmgr("modify", "qos", name, "set", *words.split())
        _sacctmgr("modify", "account", "dev", "set", f"qos+={names}")
        yield
    finally:
        _sacctmgr("modify", "account", "dev", "set", f"qos-={names}")
        _sacctmgr("delete", "qos", names)


@contextmanager
def preempted_by_urgent(settings: Mapping[str, str]) -> Iterator[None]:
    """Adds QOS that `urgent` preempts, beside `normal`."""
    with extra_qos(settings):
        try:
            _sacctmgr("modify", "qos", "urgent", "set", f"preempt=normal,{','.join(settings)}")
            yield
        finally:
            _sacctmgr("modify", "qos", "urgent", "set", "preempt=normal")


@contextmanager
def qos_pair(name: str, *, grace_s: int) -> Iterator[tuple[str, str]]:
    """Adds two QOS, the first of which the second alone preempts: nobody else's jobs are touched; yields both names."""
    weak, strong = f"{name}weak", f"{name}strong"
    with extra_qos({weak: f"gracetime={grace_s} preemptmode=requeue", strong: f"preempt={weak}"}):
        yield weak, strong


def _sacctmgr(*words: str, must: bool = True) -> None:
    command("sacctmgr", "--immediate", "--quiet", *words, must=must)


# Nodes as Slurm sees them


def start_urgent_job(nodes: Sequence[str]) -> str:
    """Submits a job that takes some nodes whole, preempts what runs there, and ends at once; returns its id."""
    size = (f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", "--exclusive")
    return command(
        "sbatch", "--parsable", "--qos=urgent", "--job-name=urgent", *size, "--output=/dev/null", "--wrap=true"
    )


def take_nodes(nodes: Sequence[str]) -> None:
    """Preempts whatever runs on some nodes; returns when the urgent job has ended and the runs are coming back."""
    # `sbatch --wait` looks only every half minute.
    wait_for_state(start_urgent_job(nodes), "COMPLETED", within_s=240)


@contextmanager
def daemons_stopped(nodes: Sequence[str]) -> Iterator[None]:
    """Stops the slurmd of some nodes; what runs there lives on for a while."""
    for node in nodes:
        stop_node(DEFAULT_STATE_DIR, node=node)
    try:
        yield
    finally:
        for node in nodes:
            start_node(DEFAULT_STATE_DIR, node=node)


@contextmanager
def node_lost(node: str) -> Iterator[None]:
    """Kills all that runs on a node at once, its slurmd included, as a power cut does; it comes back at the end."""
    crash_node(DEFAULT_STATE_DIR, node=node)
    try:
        yield
    finally:
        start_node(DEFAULT_STATE_DIR, node=node)


@contextmanager
def node_down(node: str) -> Iterator[None]:
    """Declares a node down: Slurm ends what runs there."""
    command("scontrol", "update", f"nodename={node}", "state=down", "reason=campaign")
    try:
        yield
    finally:
        # With ReturnToService=2 it comes back by itself as soon as it registers, and then there is nothing to resume.
        command("scontrol", "update", f"nodename={node}", "state=resume", must=False)
        wait_for(lambda: _is_up(node), within_s=60, what=f"{node} to come back")


def _is_up(node: str) -> bool:
    states = command("sinfo", "--noheader", f"--nodes={node}", "--format=%T", must=False).split()
    return bool(states) and set(states) <= {"idle", "mixed", "allocated", "completing"}


# A node's own view of files and network


def slurmd_pid(node: str) -> int:
    """Returns the process of a node's slurmd."""
    record = daemon_process(cluster(), f"slurmd-{node}")
    assert record is not None and record.is_alive(), f"{node} has no slurmd"
    return record.pid


def on_node(node: str, *command: str, check: bool = True) -> None:
    """Runs a command as the node sees files and network."""
    enter = ["nsenter", f"--target={slurmd_pid(node)}", "--mount", "--net", "--"]
    done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 or not check, f"{command} on {node}: {done.stdout}{done.stderr}"


@contextmanager
def few_files(node: str, limit: int) -> Iterator[None]:
    """Gives what a node's slurmd starts from now on a hard limit of open files."""
    resource.prlimit(slurmd_pid(node), resource.RLIMIT_NOFILE, (limit, limit))
    try:
        yield
    finally:
        # A hard limit can be raised again with CAP_SYS_RESOURCE only, which root may lack in a container.
        stop_node(DEFAULT_STATE_DIR, node=node)
        start_node(DEFAULT_STATE_DIR, node=node)


@contextmanager
def mounted_over(node: str, path: Path, *mount: str) -> Iterator[None]:
    """Mounts something over a path as one node sees it, e.g. mounted_over("node2", path, "-t", "tmpfs", "none")."""
    on_node(node, "mount", *mount, str(path))
    try:
        yield
    finally:
        on_node(node, "umount", "--lazy", str(path))


def other_content(node: str, path: Path, scratch: Path, change: Callable[[str], str]) -> AbstractContextManager[None]:
    """Has one node read a file that was changed."""
    copy = scratch / f"{node}_{path.name}"
    copy.write_text(change(path.read_text()))
    return mounted_over(node, path, "--bind", str(copy))


def other_hosts(node: str, scratch: Path, *, name: str, address: str | None) -> AbstractContextManager[None]:
    """Has one node resolve a name to another address, or to none."""

    def change(text: str) -> str:
        kept = [line for line in text.splitlines() if name not in line.partition("#")[0].split()[1:]]
        return "\n".join([*kept, *([f"{address} {name}"] if address else [])]) + "\n"

    return other_content(node, Path("/etc/hosts"), scratch, change)


@contextmanager
def private_copy(node: str, folder: Path, scratch: Path) -> Iterator[Path]:
    """Has one node see a copy of a folder, as it is now, in the folder's place; gives the copy."""
    copy = scratch / f"{node}_{folder.name}"
    shutil.copytree(folder, copy, symlinks=True)
    with mounted_over(node, folder, "--bind", str(copy)):
        yield copy


@contextmanager
def read_only(node: str, folder: Path) -> Iterator[None]:
    """Makes a folder read-only on one node."""
    with mounted_over(node, folder, "--bind", str(folder)):
        on_node(node, "mount", "-o", "remount,bind,ro", str(folder))
        yield


@contextmanager
def full_disk(node: str, folder: Path) -> Iterator[None]:
    """Puts a small file system over a folder on one node, and fills it."""
    with mounted_over(node, folder, "-t", "tmpfs", "-o", "size=1m", "none"):
        on_node(node, "dd", "if=/dev/zero", f"of={folder}/fill", "bs=64k", check=False)
        yield


@contextmanager
def firewall(node: str, *rules: str) -> Iterator[None]:
    """Puts rules in front of what comes into a node, e.g. "tcp dport 1024-65535 drop"."""
    on_node(node, "nft", "add table inet preflight_faults")
    try:
        on_node(node, "nft", "add chain inet preflight_faults incoming { type filter hook input priority 0; }")
        for rule in rules:
            on_node(node, "nft", f"add rule inet preflight_faults incoming {rule}")
        yield
    finally:
        on_node(node, "nft", "delete table inet preflight_faults")


def from_node(node: str, verdict: str) -> str:
    """Returns a rule about what comes from another node; the high ports stay open, since srun listens there."""
    return f"ip saddr {cluster().addresses[node]} tcp dport 10000-32767 {verdict}"


@contextmanager
def blackhole(node: str, peer: str) -> Iterator[None]:
    """Lets nothing get from one node to another."""
    route = ("blackhole", f"{cluster().addresses[peer]}/32")
    on_node(node, "ip", "route", "add", *route)
    try:
        yield
    finally:
        on_node(node, "ip", "route", "del", *route)


@contextmanager
def second_interface(nodes: Sequence[str]) -> Iterator[None]:
    """Gives nodes a second interface each, eth9, that leads nowhere."""
    with ExitStack() as made:
        for index, node in enumerate(nodes, start=1):
            on_node(node, "ip", "link", "add", "eth9", "type", "veth", "peer", "name", "eth9p")
            made.callback(on_node, node, "ip", "link", "del", "eth9")
            on_node(node, "ip", "address", "add", f"192.168.77.{index}/24", "dev", "eth9")
            for end in ("eth9", "eth9p"):
                on_node(node, "ip", "link", "set", end, "up")
        yield


@contextmanager
def slow_link(node: str) -> Iterator[None]:
    """Limits a node's network to 20 Mbit/s in both directions."""
    with ExitStack() as undo:
        command("tc", "qdisc", "add", "dev", host_link(node), *_bucket("20mbit", "64k", "50ms"))
        undo.callback(command, "tc", "qdisc", "del", "dev", host_link(node), "root")
        _limit(node, *_bucket("20mbit", "64k", "50ms"), undo=undo)
        yield


@contextmanager
def limited_links(rate: str) -> Iterator[None]:
    """Limits what every node of the cluster may send, e.g. to "100mbit"; taken away in all cases."""
    with ExitStack() as undo:
        for node in cluster().node_names:
            _limit(node, *_bucket(rate, "64kb", "400ms"), undo=undo)
        yield


def _limit(node: str, *bucket: str, undo: ExitStack) -> None:
    undo.callback(on_node, node, "tc", "qdisc", "del", "dev", NODE_INTERFACE, "root", check=False)
    on_node(node, "tc", "qdisc", "add", "dev", NODE_INTERFACE, *bucket)


def _bucket(rate: str, burst: str, latency: str) -> tuple[str, ...]:
    return ("root", "tbf", "rate", rate, "burst", burst, "latency", latency)


@contextmanager
def bound_to_cpu(node: str) -> Iterator[None]:
    """Lets everything that Slurm starts on a node from now on use CPU 0 alone."""
    pid, before = slurmd_pid(node), os.sched_getaffinity(slurmd_pid(node))
    _bind(pid, {0})
    try:
        yield
    finally:
        _bind(pid, before)


def _bind(pid: int, cpus: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


@contextmanager
def hogs() -> Iterator[None]:
    """Keeps CPU 0 busy with processes of another user, with more of them than the machine has to do already."""
    loop = ["taskset", "--cpu-list", "0", "sh", "-c", "while :; do :; done"]
    count = 6 + 2 * int(os.getloadavg()[0])
    running = [subprocess.Popen(loop, start_new_session=True) for _ in range(count)]
    for process in running:
        # As important as the ranks, however little this process is.
        os.setpriority(os.PRIO_PROCESS, process.pid, 0)
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def task_prolog(scratch: Path, node: str, *lines: str, elsewhere: Sequence[str] = ("true",)) -> str:
    """Returns a word for a run whose tasks on one node begin with shell lines; what they print as "export NAME=VALUE"
    is in the environment of the ranks there."""
    script = scratch / f"prolog_{node}.sh"
    here, there = ("\n".join(f"  {line}" for line in part) for part in (lines, elsewhere))
    script.write_text(f'#!/bin/sh\nif [ "$SLURMD_NODENAME" = {node} ]; then\n{here}\nelse\n{there}\nfi\nexit 0\n')
    script.chmod(0o755)
    return f"cluster.srun.task-prolog={script}"
