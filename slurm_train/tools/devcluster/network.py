"""One bridge, and per node a network namespace with a veth on it. Everything is found again by its name."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import run_command, succeeds
from slurm_train.tools.devcluster.plan import ClusterPlan
from slurm_train.tools.devcluster.processes import ProcessRecord, read_process

BRIDGE = "slurmtrain0"
NODE_INTERFACE = "eth0"
_NAMESPACES = Path("/run/netns")


def build_network(plan: ClusterPlan) -> None:
    """Makes bridge and namespaces; what is there already stays."""
    if not has_link(BRIDGE):
        run_command(["ip", "link", "add", BRIDGE, "type", "bridge"])
        run_command(["ip", "address", "add", f"{plan.controller_address}/24", "dev", BRIDGE])
    run_command(["ip", "link", "set", BRIDGE, "up"])
    present = list_namespaces()
    for name in plan.node_names:
        if name not in present:
            _build_node(name, address=plan.node_address(name))


def _build_node(name: str, *, address: str) -> None:
    outside = host_link(name)
    inside = ["ip", "netns", "exec", name]
    run_command(["ip", "netns", "add", name])
    # c10d would try and warn about IPv6 on every connection; off before the interface comes up.
    run_command([*inside, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"])
    run_command(["ip", "link", "add", outside, "type", "veth", "peer", "name", NODE_INTERFACE, "netns", name])
    run_command(["ip", "link", "set", outside, "master", BRIDGE, "up"])
    run_command(["ip", "-n", name, "link", "set", "lo", "up"])
    run_command(["ip", "-n", name, "address", "add", f"{address}/24", "dev", NODE_INTERFACE])
    run_command(["ip", "-n", name, "link", "set", NODE_INTERFACE, "up"])


def remove_network(names: tuple[str, ...]) -> None:
    """Removes namespaces, their veths and the bridge; what is not there is passed over."""
    present = list_namespaces()
    for name in names:
        if name in present:
            run_command(["ip", "netns", "delete", name])
        # A veth goes with its namespace, but the kernel may take its time.
        if has_link(host_link(name)):
            with suppress(ClusterError):
                run_command(["ip", "link", "delete", host_link(name)])
    if has_link(BRIDGE):
        run_command(["ip", "link", "delete", BRIDGE])


def host_link(name: str) -> str:
    """Returns the host's end of a node's veth, e.g. "st-node1"."""
    return f"st-{name}"


def has_link(name: str) -> bool:
    """Tells whether this machine has a network interface of a name."""
    return name in {link for _, link in socket.if_nameindex()}


def list_namespaces() -> set[str]:
    """Returns the names of all network namespaces of this machine."""
    return {entry.name for entry in _NAMESPACES.iterdir()} if _NAMESPACES.is_dir() else set()


def processes_inside(names: tuple[str, ...]) -> list[ProcessRecord]:
    """Returns every process in the namespaces: slurmd, slurmstepd and the ranks of jobs."""
    present = list_namespaces()
    inside = []
    for name in names:
        if name in present:
            inside += [read_process(int(pid)) for pid in run_command(["ip", "netns", "pids", name]).split()]
    return [process for process in inside if process is not None]


def is_namespace_mount() -> bool:
    """Tells whether /run/netns is a mount; `ip netns add` makes it one the first time and never takes it away."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return any(line.split()[1] == str(_NAMESPACES) for line in mounts)


def remove_namespace_mount() -> None:
    """Unmounts and removes an empty /run/netns."""
    if list_namespaces():
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
