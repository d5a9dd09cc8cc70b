"""One thing that is wrong: a stable code, how bad, what was seen, where, and what to do about it.

The codes are the same in logs, ledger, `status`, `doctor --json` and docs/troubleshooting.md, which has a section for
each. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
"""error: the ranks are not started; warning: they are, and somebody should know; note: how things are here."""

RUN_CODES: Mapping[str, str] = {
    "WRONG_MASTER": "a node looks for rank 0 at an address that is not rank 0's",
    "NAME_RESOLUTION": "a node cannot resolve a name",
    "PORT_BLOCKED": "packets to a port do not arrive",
    "PORT_IN_USE": "somebody else holds the port that the ranks were to meet at",
    "WRONG_INTERFACE": "the collectives would use an interface that the other nodes do not reach",
    "LOOPBACK": "a name resolves to this machine itself",
    "RANK_MISMATCH": "the ranks do not agree about who is who",
    "NODE_MISSING": "nothing is heard from a node",
    "GPU_COUNT": "a node has fewer GPUs than ranks",
    "GPU_BUSY": "somebody else holds memory of a GPU",
    "GPU_SICK": "a GPU reports errors or is held back",
    "CODE_DRIFT": "a node sees other code than was submitted",
    "VERSION_DRIFT": "a node has another version of something",
    "CONFIG_DRIFT": "a node sees another frozen configuration",
    "DATA_MISSING": "a node does not see the data, or sees other data",
    "FS_MISSING": "a node does not see the run directory",
    "FS_STALE": "a node does not see what another one has written",
    "FS_READONLY": "a node cannot write where it must",
    "DISK_FULL": "there is no room left",
    "CLOCK_SKEW": "a node's clock goes wrong",
    "CPU_AFFINITY": "ranks are bound to too few CPUs",
    "LIMITS": "a limit of the processes is too low",
    "SLOW_NODE": "a node computes more slowly than the others",
    "SLOW_LINK": "a node's network is slower than the others'",
    "COLLECTIVE": "the first exchange of the process group fails",
}
SITE_CODES: Mapping[str, str] = {
    "NO_SLURM": "there are no Slurm commands here",
    "CONTROLLER_AWAY": "Slurm's controller does not answer",
    "OLD_SLURM": "this Slurm is older than what this toolkit was written for",
    "NO_GRACE": "a preempted job has no time to save",
    "SHORT_GRACE": "a preempted job has little time to save",
    "SUSPENDS": "a preempted job is stopped and stays in memory",
    "USER_SIGNAL": "preemption sends the job's own warning signal",
    "NO_REQUEUE": "jobs are not requeued unless they ask for it",
    "REQUEUE_DELAY": "how long a requeued job waits before it may start",
    "LOG_TRUNCATED": "a requeue would empty the log",
    "JOB_ENDS": "which processes of a job get the signals",
    "NO_ACCOUNTING": "Slurm keeps no accounts",
    "ARRAY_SIZE": "how many runs fit into one job array",
    "GPU_FLAG": "how GPUs are asked for here",
    "CONTAINERS": "container runtimes",
    "TIME_LIMITS": "time limits of the partitions",
    "PARTITION_DOWN": "a partition starts no jobs",
}
CODES: Mapping[str, str] = {**RUN_CODES, **SITE_CODES}

_PAGE = "docs/troubleshooting.md"
_ORDER = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem, said once however many nodes have it."""

    code: str
    level: Level
    seen: str
    """What was asked and found, with values; one line."""
    todo: str
    """What to do about it; one line."""
    node: str = ""
    """The node or nodes, "node3" or "node2, node3"; "" where it is everywhere or nowhere in particular."""
    blames_node: bool = False
    """Whether leaving these nodes out would mend it."""

    def __post_init__(self) -> None:
        assert self.code in CODES, f"{self.code} is not in the registry"

    @property
    def line(self) -> str:
        """All of it in one line, e.g. "DISK_FULL node3: ...; free some (docs/troubleshooting.md#disk_full)"."""
        return f"{self.short}; {self.hint}"

    @property
    def short(self) -> str:
        """Code, node and what was seen."""
        return f"{self.code}{' ' + self.node if self.node else ''}: {self.seen}"

    @property
    def hint(self) -> str:
        """What to do, and where more is said."""
        return f"{self.todo} ({link(self.code)})"

    def as_json(self) -> dict[str, Any]:
        """Returns it for a file or `--json`, the line for people included."""
        return {**asdict(self), "line": self.line}


def link(code: str) -> str:
    """Returns where a code is explained."""
    return f"{_PAGE}#{code.lower()}"


def merge(findings: Iterable[Finding], *, nodes: Sequence[str]) -> tuple[Finding, ...]:
    """Returns the worst first, with what several nodes have in common said once.

    Args:
        findings: as found, one per node.
        nodes: all nodes; what all of several have is nobody's in particular.
    """
    alike: dict[tuple[str, Level, str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.code, finding.level, finding.seen, finding.todo), []).append(finding)
    merged = [_joined(group, nodes) for group in alike.values()]
    return tuple(sorted(merged, key=lambda finding: _ORDER[finding.level]))


def _joined(group: Sequence[Finding], nodes: Sequence[str]) -> Finding:
    names = list(dict.fromkeys(finding.node for finding in group))
    if len(names) == 1:
        return group[0]
    if set(nodes) <= set(names):
        return replace(group[0], node="", blames_node=False)
    # What most nodes have is no fault of theirs.
    is_rare = 2 * len(names) < len(nodes)
    return replace(group[0], node=", ".join(names), blames_node=is_rare and all(item.blames_node for item in group))


def errors_in(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns those that keep the ranks from starting."""
    return tuple(finding for finding in findings if finding.level == "error")


def read_finding(value: Mapping[str, Any]) -> Finding:
    """Returns what `as_json` gave."""
    return Finding(**{name: value[name] for name in ("code", "level", "seen", "todo", "node", "blames_node")})
