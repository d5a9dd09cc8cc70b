"""The nodes of a job as one table of text, a row for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_train.tools.doctor.evidence import Evidence
from slurm_train.tools.doctor.facts import NodeFacts
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.majority import as_ranges

_HEADER = (
    *("NODE", "RANKS", "GPUS", "GPU FREE", "CPUS", "WAY TO IT", "CLOCK", "RUN DIR FREE", "VERSIONS"),
    *("WORK", "LINK", "LATENCY", "FOUND"),
)


def node_table(evidence: Evidence, findings: Iterable[Finding]) -> list[str]:
    """Returns the lines of the table, the header first."""
    codes: dict[str, list[str]] = {}
    for finding in findings:
        for name in filter(None, finding.node.split(", ")):
            codes.setdefault(name, []).append(finding.code)
    rows = [_row(node, evidence, codes.get(node.node, [])) for node in sorted(evidence.nodes, key=_position)]
    return aligned([_HEADER, *rows])


def _position(node: NodeFacts) -> int:
    return node.node_rank


def _row(node: NodeFacts, evidence: Evidence, codes: Sequence[str]) -> tuple[str, ...]:
    ranks = [rank for rank in evidence.ranks if rank.node == node.node]
    gpus = {rank.visible_gpus for rank in ranks if rank.visible_gpus is not None}
    free = [gpu.total_mb - gpu.used_mb for gpu in node.gpus or ()]
    bound = {cpu for rank in ranks for cpu in rank.cpus}
    probe = next((probe for probe in evidence.probes if probe.node == node.node), None)
    offset = None if probe is None else probe.clock_offset_s
    speed = next((speed for speed in evidence.speeds if speed.node == node.node), None)
    run_disk = next((disk.free_mb for disk in node.disks if disk.role == "run directory"), None)
    return (
        node.node,
        as_ranges([rank.rank for rank in ranks]) or "-",
        str(max(gpus)) if gpus else "-",
        f"{min(free) / 1024:.0f} GiB" if free else "-",
        f"{len(bound)} of {node.num_cpus}" if bound else "-",
        f"{node.network.interface} {node.network.address}".strip() or "-",
        "0" if node.node_rank == 0 else "-" if offset is None else f"{offset:+.3f} s",
        "-" if run_disk is None else f"{run_disk / 1024:,.0f} GiB",
        ", ".join(f"{name} {value}" for name, value in node.versions.items() if name in ("torch", "driver")) or "-",
        "-" if speed is None else f"{speed.work_ms:.0f} ms",
        "-" if speed is None or not speed.mb_per_s else f"{max(speed.mb_per_s.values()):,.0f} MB/s",
        "-" if speed is None or not speed.latency_us else f"{min(speed.latency_us.values()):,.0f} us",
        ", ".join(dict.fromkeys(codes)) or "nothing",
    )


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns rows as aligned columns; columns that hold nothing but "-" are left out."""
    cells = [list(row) for row in rows]
    columns = [column for column in range(len(cells[0])) if any(row[column] != "-" for row in cells[1:])]
    widths = {column: max(len(row[column]) for row in cells) for column in columns}
    return ["  ".join(row[column].ljust(widths[column]) for column in columns).rstrip() for row in cells]
