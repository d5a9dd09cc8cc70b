"""Takes a cluster away completely, whatever state it is in: whole, half built, half dead, or after a reboot."""

from __future__ import annotations

import shutil
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster import hosts, network
from slurm_train.tools.devcluster.plan import SYSTEM_SLURM_CONF, load_plan
from slurm_train.tools.devcluster.processes import ProcessRecord, end_processes, find_marked, read_record
from slurm_train.tools.devcluster.requirements import is_our_link

# Name of the file that says that /run/netns was a mount before us and stays one.
NETNS_KEPT = "netns-mount-kept"


def tear_down(state_dir: Path) -> bool:
    """Ends every process of a cluster, jobs included, and removes all that it made.

    Returns:
        Whether there was anything to remove.

    Raises:
        ClusterError: a process does not end, or the directory is not a cluster's state.
    """
    names = _node_names(state_dir)
    begun = (state_dir / "plan.json").exists()
    if state_dir.is_dir() and not begun and any(state_dir.iterdir()):
        raise ClusterError(f"{state_dir} is not the state of a cluster; nothing removed", hint="give its --state")
    end_processes(lambda: _processes(state_dir, names))
    if not (names or begun or is_our_link(state_dir) or state_dir.is_dir()):
        return False
    if names:
        network.remove_network(names)
    if names and not (state_dir / NETNS_KEPT).exists():
        network.remove_namespace_mount()
    hosts.write_hosts(hosts.without_hosts(hosts.read_hosts()))
    if is_our_link(state_dir):
        SYSTEM_SLURM_CONF.unlink()
    _remove_directory(state_dir)
    return True


def _node_names(state_dir: Path) -> tuple[str, ...]:
    """Returns the nodes of the plan; of our lines in /etc/hosts where the plan is gone."""
    plan = load_plan(state_dir)
    if plan is not None:
        return plan.node_names
    marked = hosts.marked_hosts(hosts.read_hosts())
    return tuple(name for name, owner in marked.items() if owner == state_dir and name.startswith("node"))


def _processes(state_dir: Path, names: tuple[str, ...]) -> list[ProcessRecord]:
    records = [read_record(path) for path in (state_dir / "pid").glob("*")]
    recorded = [record for record in records if record is not None and record.is_alive()]
    return [*recorded, *find_marked(state_dir), *network.processes_inside(names)]


def _remove_directory(state_dir: Path) -> None:
    """Removes the state; the plan goes last, so that an interrupted removal can be typed again."""
    if not state_dir.is_dir():
        return
    for entry in state_dir.iterdir():
        if entry.name == "plan.json":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (state_dir / "plan.json").unlink(missing_ok=True)
    state_dir.rmdir()
