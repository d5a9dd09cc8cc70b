"""Faults of one node of the test cluster, caused for real and undone afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_train.tools.devcluster.daemons import daemon_process
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR, load_plan
from slurm_train.tools.devcluster.system import NODE_INTERFACE


@contextmanager
def limited_links(rate: str) -> Iterator[None]:
    """Limits what every node of the cluster may send, e.g. to "100mbit"; taken away in all cases."""
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    limited = []
    try:
        for node in plan.node_names:
            inside = ["ip", "netns", "exec", node, "tc", "qdisc"]
            limited.append(inside)
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
            subprocess.run([*inside, "add", "dev", NODE_INTERFACE, "root", *bucket], check=True)
        yield
    finally:
        for inside in limited:
            subprocess.run([*inside, "del", "dev", NODE_INTERFACE, "root"], check=False)


@contextmanager
def hidden_from(node: str, folder: Path) -> Iterator[None]:
    """Mounts an empty file system over a folder as one node sees it; the other nodes and we see it as before."""
    enter = _inside(node)
    subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", str(folder)], check=True)


@contextmanager
def mounted_on(node: str, device: str, folder: Path) -> Iterator[None]:
    """Mounts a block device as one node sees it; mounted elsewhere as well it is one file system."""
    enter = _inside(node)
    subprocess.run([*enter, "mount", device, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", "--lazy", str(folder)], check=True)


def _inside(node: str) -> list[str]:
    """Returns the words that run a command with the mounts of a node."""
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    record = daemon_process(plan, f"slurmd-{node}")
    assert record is not None, f"{node} has no slurmd"
    return ["nsenter", f"--target={record.pid}", "--mount", "--"]
