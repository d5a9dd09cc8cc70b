"""Leaves out nodes that were found bad a while ago, where Slurm has others enough."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence

from slurm_train.errors import ClusterError
from slurm_train.rundir.bad_nodes import BadNode, read_bad_nodes
from slurm_train.rundir.layout import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.nodelist import NodeListError, parse_nodelist

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
        parts = commands.partitions()
    except (ClusterError, NodeListError):
        return False
    wanted = directives.get("partition", "")
    usable = sum(part.num_usable_nodes for part in parts if (part.name == wanted if wanted else part.is_default))
    # "2-4": as many as there are, and the fewest will do.
    return usable - len(kept_away) >= int(directives.get("nodes", "1").partition("-")[0])


def listed_among(nodes: Sequence[str], run: RunDirectory) -> list[BadNode]:
    """Returns the nodes of an allocation that are listed."""
    return [bad for bad in read_bad_nodes(run, now_unix_s=time.time()) if bad.node in nodes]
