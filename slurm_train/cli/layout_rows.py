"""What `plan` says of a layout: who stands where, what a rank holds and sends, how long a pipeline stands idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurm_train.config.layout import AXES
from slurm_train.launch.layout_memory import (
    LayoutFacts,
    Traffic,
    facts_of,
    pipeline_bubble,
    spans_nodes,
    traffic,
)
from slurm_train.launch.layout_peak import RankMemory, fullest_stage, rank_memory

if TYPE_CHECKING:
    from slurm_train.launch.plan import RunPlan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def layout_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table about its layout; none where every rank is a whole replica."""
    layout = plan.layout
    if layout.is_replicated:
        return []
    rows = [("layout", f"{layout}; {layout.data_parallel_size} read different samples")]
    rows += [("", _group_text(plan, axis)) for axis in reversed(AXES) if getattr(layout, axis) > 1]
    facts = facts_of(plan.config, layout, plan.batch)
    if facts is not None:
        rows += _estimates(plan, facts)
    if layout.pp > 1:
        per_rank = plan.config.parallel.stages_per_rank
        idle = pipeline_bubble(layout, plan.batch, stages_per_rank=per_rank)
        rows.append(
            ("bubble", f"{idle:.0%} of a step: {layout.pp * per_rank} stages, {plan.batch.accumulation} micro-batches")
        )
    return rows


def _estimates(plan: RunPlan, facts: LayoutFacts) -> list[tuple[str, str]]:
    stage = fullest_stage(facts)
    where = f"a rank of stage {stage}" if plan.layout.pp > 1 else "each rank"
    sent = [_traffic_text(one) for one in traffic(facts, plan.world)]
    return [
        ("memory", f"{where}: {_memory_text(rank_memory(facts, stage=stage))} (estimated)"),
        ("sends", f"{where}, each step: {', '.join(sent)} (estimated)"),
    ]


def _memory_text(memory: RankMemory) -> str:
    named = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "gathered": memory.gathered,
        "activations": memory.activations,
    }
    parts = " + ".join(f"{size(value)} {name}" for name, value in named.items() if value)
    host = f"; {size(memory.host)} in host memory" if memory.host else ""
    return f"{size(memory.total)} = {parts}{host}"


def _traffic_text(one: Traffic) -> str:
    return f"{size(one.num_bytes)} along {one.axis} ({'between' if one.spans_nodes else 'inside'} nodes)"


def _group_text(plan: RunPlan, axis: str) -> str:
    layout = plan.layout
    members = layout.members((axis,), 0)
    step = members[1] - members[0]
    ranks = f"{members[0]}-{members[-1]}" if step == 1 else f"{members[0]}, {members[1]}, .. {members[-1]}"
    if len(members) == 2:
        ranks = f"{members[0]}, {members[1]}"
    where = "over several nodes" if spans_nodes(layout, plan.world, axis) else "on one node each"
    return f"{axis}: {layout.world_size // len(members)} groups of {len(members)}, {where}; the first: ranks {ranks}"


def size(num_bytes: int) -> str:
    """Returns bytes for people, e.g. "1.5 GiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_UNITS[unit]}"
