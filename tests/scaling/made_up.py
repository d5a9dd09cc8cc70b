"""Measurements as a model would give them."""

from __future__ import annotations

import math

from slurm_train.scaling.measure import Measured
from slurm_train.scaling.points import Mode, Point, Size

GRADIENT_BYTES = 5e6


def measured(
    nodes: int,
    per_node: int,
    *,
    comm: str = "none",
    sent_bytes: float = GRADIENT_BYTES,
    alpha_s: float = 0.0,
    bytes_per_s: float = 12.5e6,
    compute_s: float = 0.1,
    data_s: float = 0.0,
    uneven_s: float = 0.0,
    modes: tuple[Mode, ...] = ("local",),
) -> Measured:
    size = Size(nodes, per_node)
    ranks = size.ranks
    comm_s = alpha_s * math.log2(ranks) + 2 * (ranks - 1) / ranks * sent_bytes / bytes_per_s
    step_s = compute_s + data_s + uneven_s + comm_s
    return Measured(
        point=Point(size, 4, 1, comm, modes),
        step_s=step_s,
        per_s=4 * ranks / step_s,
        unit="samples",
        compute_s=compute_s,
        data_s=data_s,
        comm_s=comm_s,
        uneven_s=uneven_s,
        gradient_bytes=GRADIENT_BYTES,
        sent_bytes=sent_bytes,
    )
