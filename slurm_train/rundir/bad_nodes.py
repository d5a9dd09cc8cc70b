"""Nodes that were found bad, in files that all runs of a root share: later submissions leave them out for a while.

Each node that found some has a file, `bad_nodes@<host>.jsonl`: one line for each time that a node was found bad, or
found well again. What is older than its term does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_train.rundir.files import append_shared, read_shared
from slurm_train.rundir.layout import RunDirectory

FILE, PARTS = "bad_nodes.jsonl", "bad_nodes@*.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadNode:
    """One node that is to be left out."""

    node: str
    why: str
    """Code and what was seen."""
    until_unix_s: float

    def __str__(self) -> str:
        until = time.strftime("%d %b %H:%M", time.localtime(self.until_unix_s))
        return f"{self.node} (until {until}; {self.why})"


def list_file(run: RunDirectory) -> Path:
    """Returns the list that a run shares with the others below its root; each node has a part of it."""
    return run.path.parent.parent / FILE


def add_bad_nodes(run: RunDirectory, found: Mapping[str, str], *, hours: float, now_unix_s: float) -> None:
    """Lists nodes.

    Args:
        run: the run that has found them.
        found: node -> why.
        hours: for how long; 0: not at all.
        now_unix_s: seconds since 1970.
    """
    for node, why in found.items() if hours > 0 else ():
        line = {"node": node, "why": why, "run": str(run.path), "time_unix_s": now_unix_s}
        append_shared(list_file(run), {**line, "until_unix_s": now_unix_s + 3600 * hours})


def forgive_nodes(run: RunDirectory, nodes: Iterable[str], *, now_unix_s: float) -> list[str]:
    """Takes nodes off the list that were found well; returns those that were on it."""
    listed = {bad.node for bad in read_bad_nodes(run, now_unix_s=now_unix_s)}
    well = [node for node in nodes if node in listed]
    for node in well:
        facts = {"node": node, "why": "found well", "run": str(run.path), "time_unix_s": now_unix_s}
        append_shared(list_file(run), {**facts, "until_unix_s": 0.0})
    return well


def read_bad_nodes(run: RunDirectory, *, now_unix_s: float) -> list[BadNode]:
    """Returns the nodes that are on the list now, the last line about each counting."""
    found: dict[str, BadNode] = {}
    try:
        for line in read_shared(list_file(run)):
            node, until = str(line.get("node", "")), line.get("until_unix_s")
            if node and isinstance(until, (int, float)):
                found[node] = BadNode(node=node, why=str(line.get("why", "")), until_unix_s=float(until))
    except OSError:
        return []
    return [bad for bad in found.values() if bad.until_unix_s > now_unix_s]
