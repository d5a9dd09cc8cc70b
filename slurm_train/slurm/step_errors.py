"""What srun says when tasks of a step end badly. Pure text in, words out."""

from __future__ import annotations

import re

_TASK_ERROR = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>[\d,-]+): (?P<what>.+)$", re.MULTILINE)
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<nodes>\S+)", re.MULTILINE)
_SRUN_KILLED = re.compile(r"^srun: error: (?P<what>srun itself was killed by signal \d+)$", re.MULTILINE)
# What the supervisor writes when a node did not say whether it sees the run.
_SILENT = re.compile(r"^error: (?P<what>no answer from .+ within \d+ s)", re.MULTILINE)
WARNED = "User defined signal 2"
"""The end of a rank that does not handle the warning before the time limit: a script as it is."""
# Terminated and a plain exit code are what the peers of the culprit show.
_VIOLENT = (
    "Killed",
    "Segmentation fault",
    "Aborted",
    "Bus error",
    "Out Of Memory",
    "Illegal instruction",
    "Floating",
    WARNED,
)


def violent_end(text: str) -> str:
    """Returns the first end by a signal, a lost or a silent node, e.g. "rank 3 on node2: Killed"; "" if none."""
    lost = _NODE_FAILURE.search(text)
    if lost:
        return f"node failure on {lost['nodes']}"
    killed = _SRUN_KILLED.search(text)
    if killed:
        return killed["what"]
    silent = _SILENT.search(text)
    if silent:
        return silent["what"]
    for match in _TASK_ERROR.finditer(text):
        if match["what"].startswith(_VIOLENT):
            word = "ranks" if "," in match["tasks"] or "-" in match["tasks"] else "rank"
            return f"{word} {match['tasks']} on {match['node']}: {match['what']}"
    return ""
