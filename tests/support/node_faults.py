"""Faults of one node of the test cluster, caused for real and undone afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slurm_train.devcluster.daemons import node_daemon, record_path
from slurm_train.devcluster.plan import DEFAULT_STATE_DIR, load_plan
from slurm_train.devcluster.processes import read_record


@contextmanager
def hidden_from(node: str, folder: Path) -> Iterator[None]:
    """Mounts an empty file system over a folder as one node sees it; the other nodes and we see it as before."""
    plan = load_plan(DEFAULT_STATE_DIR)
    assert plan is not None, "no cluster is up"
    record = read_record(record_path(plan, name=node_daemon(plan, node=node).name))
    assert record is not None, f"{node} has no slurmd"
    enter = ["nsenter", f"--target={record.pid}", "--mount", "--"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, "umount", str(folder)], check=True)
