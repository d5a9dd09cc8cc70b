"""What rules are made of, and what comes of them: findings, one for each problem however many nodes have it. Pure.

`node_rules` has the rules about the nodes of a job, `site_rules` those about a cluster. A rule is a function with a
code and a hint; docs/troubleshooting.md has a section for each code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from slurm_train.rundir.events import Finding

Facts = TypeVar("Facts")
Check = Callable[[Facts], Iterator[Finding]]
_ORDER = ("error", "warning", "note")


class Rules(Generic[Facts]):
    """Rules about one kind of facts, in the order in which their findings are printed."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self._rules: list[tuple[str, str, Check[Facts]]] = []

    def add(self, code: str, *more: str, hint: str = "") -> Callable[[Check[Facts]], Check[Facts]]:
        """Makes a rule of a function that yields findings.

        Args:
            code: of its findings, e.g. "DISK_FULL"; several rules may share one.
            more: other codes that its findings may name.
            hint: what to do about it; a finding may bring its own.
        """

        def add(check: Check[Facts]) -> Check[Facts]:
            self.codes += [one for one in (code, *more) if one not in self.codes]
            self._rules.append((code, hint, check))
            return check

        return add

    def find(self, facts: Facts, *, nodes: Sequence[str] = (), only: Collection[str] = ()) -> tuple[Finding, ...]:
        """Returns one finding per problem, the worst first; empty where nothing is wrong.

        Args:
            facts: what is known.
            nodes: all nodes; what all of them have is the fault of none.
            only: codes of the rules to apply; empty: all.
        """
        found = [
            replace(one, code=one.code or code, todo=one.todo or hint)
            for code, hint, check in self._rules
            if not only or code in only
            for one in check(facts)
        ]
        return merge(found, nodes=nodes)


def error(node: str, seen: str, *, blames: bool = False, hint: str = "", code: str = "") -> Finding:
    """Returns a finding that keeps the ranks from starting; code and hint are the rule's where none are given."""
    return Finding(code=code, level="error", seen=seen, todo=hint, node=node, blames_node=blames)


def warning(node: str, seen: str, *, hint: str = "", code: str = "") -> Finding:
    """Returns a finding that is printed, and the ranks start."""
    return Finding(code=code, level="warning", seen=seen, todo=hint, node=node)


def note(seen: str, *, hint: str = "", code: str = "") -> Finding:
    """Returns a finding that says how things are here."""
    return Finding(code=code, level="note", seen=seen, todo=hint)


def merge(findings: Iterable[Finding], *, nodes: Sequence[str]) -> tuple[Finding, ...]:
    """Returns the worst first, and what several nodes have in common as one finding.

    Args:
        findings: as found, one per node.
        nodes: all nodes; what all of several have is the fault of none.
    """
    alike: dict[Finding, list[Finding]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, node="", blames_node=False), []).append(finding)
    merged = []
    for common, group in alike.items():
        names = list(dict.fromkeys(finding.node for finding in group))
        if len(names) == 1:
            merged.append(group[0])
        elif set(nodes) <= set(names):
            merged.append(common)
        else:
            # What most nodes have is no fault of theirs.
            blames = 2 * len(names) < len(nodes) and all(finding.blames_node for finding in group)
            merged.append(replace(common, node=", ".join(names), blames_node=blames))
    return tuple(sorted(merged, key=lambda finding: _ORDER.index(finding.level)))
