"""What the look before an attempt has found, on disk: rank 0 writes it, the supervisor and `status` read it.

The file holds `findings`, each with its line for people, `nodes`, which are those that were looked at, their table, how
long it took (`seconds`) and when the last rank had come (`waited_s`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slurm_train.rundir.files import read_json, write_atomic
from slurm_train.rundir.layout import RunDirectory


def write_record(run: RunDirectory, attempt: int, record: Mapping[str, Any]) -> None:
    """Puts the record of an attempt in the place of an earlier one of the same attempt."""
    write_atomic(run.preflight(attempt), json.dumps(record) + "\n", durable=False)


def read_record(run: RunDirectory, attempt: int) -> dict[str, Any]:
    """Returns the record of an attempt, {} where there is none."""
    return read_json(run.preflight(attempt)) or {}


def finding_lines(record: Mapping[str, Any]) -> list[str]:
    """Returns one line for each finding, the worst first."""
    return [str(finding.get("line", "")) for finding in record.get("findings", [])]


def codes_of(record: Mapping[str, Any]) -> str:
    """Returns codes and nodes of all findings in short, e.g. "CLOCK_SKEW node3; LIMITS"; "" where nothing was found."""
    return "; ".join(f"{found['code']} {found['node']}".strip() for found in record.get("findings", []))


def fatal_line(record: Mapping[str, Any]) -> str:
    """Returns what kept the ranks from starting, in one line; "" where nothing did."""
    lines = [str(finding["line"]) for finding in record.get("findings", []) if finding.get("level") == "error"]
    more = f" (and {len(lines) - 1} more: see preflight.json of the attempt)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def named_node(record: Mapping[str, Any]) -> str:
    """Returns the one node that the worst finding is about, "" where there is none or it is about several."""
    node = next((str(finding["node"]) for finding in record.get("findings", []) if finding.get("level") == "error"), "")
    return "" if ", " in node else node


def bad_nodes(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the nodes without which it might have gone well, each with its code and what was seen."""
    found: dict[str, str] = {}
    for finding in record.get("findings", []):
        if finding.get("level") == "error" and finding.get("blames_node"):
            for node in str(finding["node"]).split(", "):
                found.setdefault(node, f"{finding['code']}: {finding['seen']}")
    return found
