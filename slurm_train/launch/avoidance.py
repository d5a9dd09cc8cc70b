"""Leaves out nodes that were found bad, where Slurm has others enough."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence

from slurm_train.errors import ClusterError
from slurm_train.rundir.events import BadNode, read_bad_nodes
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.nodelist import compact_nodelist, parse_nodelist
from slurm_train.slurm.records import nodes_in

_DIRECTIVE = re.compile(r"^#SBATCH --(?P<name>[a-z-]+)(?:=(?P<value>.*))?$", re.MULTILINE)
_IS_HETEROGENEOUS = re.compile(r"^#SBATCH hetjob$", re.MULTILINE)


def exclude_flags(script: str, run: RunDirectory, env: Mapping[str, str]) -> list[str]:
    """Returns words for sbatch that leave out listed nodes besides those that the script leaves out itself.

    Args:
        script: the batch script.
        run: a run that it starts; its root has the list.
        env: environment for Slurm's commands, which are asked only where nodes are listed.
    """
    listed = read_bad_nodes(run, now_unix_s=time.time())
    if not listed:
        return []
    directives = _directives(script)
    if _IS_HETEROGENEOUS.search(script):
        # Words for sbatch would reach its first component only.
        return []
    # Whoever names nodes wants these.
    left_out = [bad.node for bad in listed] if "nodelist" not in directives else []
    if not left_out or not _has_enough_without(left_out, directives, SlurmCommands(env)):
        return []
    own = directives.get("exclude", "")
    return [f"--exclude={','.join(filter(None, (own, *left_out)))}"]


def describe(flags: Sequence[str], run: RunDirectory) -> str:
    """Returns what a person is told about listed nodes, "" where none are listed.

    Args:
        flags: what `exclude_flags` gave.
        run: the run.
    """
    listed = read_bad_nodes(run, now_unix_s=time.time())
    if not listed:
        return ""
    names = "; ".join(map(str, listed))
    kept = "found bad, and not left out, since the job needs them or its nodes are uneven"
    return f"left out: {names}" if flags else f"{kept}: {names}"


def _directives(script: str) -> dict[str, str]:
    found = {}
    for match in _DIRECTIVE.finditer(script):
        words = shlex.split(match["value"] or "")
        found[match["name"]] = words[0] if words else ""
    return found


def _has_enough_without(nodes: Sequence[str], directives: Mapping[str, str], commands: SlurmCommands) -> bool:
    try:
        kept_away = {*nodes, *parse_nodelist(directives.get("exclude", ""))}
        # "2-4": as many as there are, and the fewest will do.
        num_nodes = int(directives.get("nodes", "1").partition("-")[0])
        return _num_usable(directives.get("partition", ""), commands) - len(kept_away) >= num_nodes
    except ClusterError:
        return False


def _num_usable(partition: str, commands: SlurmCommands) -> int:
    parts = commands.partitions()
    chosen = (part for part in parts if (part.name == partition if partition else part.is_default))
    return sum(part.num_usable_nodes for part in chosen)


def can_avoid(nodes: str, job_id: str, commands: SlurmCommands, *, num_nodes: int) -> bool:
    """Returns whether a job could be requeued without some nodes: its partition has enough others that work.

    Args:
        nodes: a node list, e.g. "node3,node4".
        job_id: the running job.
        commands: Slurm.
        num_nodes: how many nodes the job needs.
    """
    try:
        job = commands.show_job(job_id)
        if nodes_in(job, "ReqNodeList"):
            # A job that names its nodes cannot go elsewhere.
            return False
        kept_away = {*parse_nodelist(nodes), *nodes_in(job, "ExcNodeList")}
        return _num_usable(job.get("Partition", ""), commands) - len(kept_away) >= num_nodes
    except ClusterError:
        return False


def keep_off(nodes: str, job_id: str, commands: SlurmCommands) -> None:
    """Excludes nodes from a requeued job, besides those that it excludes already.

    Slurm takes this for a waiting job only.

    Raises:
        ClusterError: Slurm refused, or does not answer.
    """
    known = nodes_in(commands.show_job(job_id), "ExcNodeList")
    new = [name for name in parse_nodelist(nodes) if name not in known]
    if new:
        commands.exclude_nodes(job_id, compact_nodelist([*known, *new]))


def listed_among(nodes: Sequence[str], run: RunDirectory) -> list[BadNode]:
    """Returns the nodes of an allocation that are listed."""
    return [bad for bad in read_bad_nodes(run, now_unix_s=time.time()) if bad.node in nodes]
