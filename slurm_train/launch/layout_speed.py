"""How long a step of the shipped GPT would take in a layout, by a simple model. Imports no torch.

The model knows arithmetic, links, a pipeline's waiting and what is computed again. It is for putting layouts into an
order, not for predicting seconds: kernels, latency and a busy network are not in it, and it was never fitted to GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_train.config.layout import AXES, ParallelLayout
from slurm_train.launch.layout_memory import LayoutFacts, Traffic, pipeline_bubble, traffic
from slurm_train.launch.world import World

_RECOMPUTED = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
"""Arithmetic beside that of an ordinary step: all of the forward pass again, or what is cheap of it."""
_ROWS_AT_HALF_SPEED = 256
"""Positions of a micro-batch at which reading a matrix takes as long as multiplying with it."""
_HIDDEN = 0.8
"""Part of the computation under which torch can send parameters and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one device of a cluster is taken to do."""

    flops: float = 400e12
    """Floating-point operations per second in practice; about 40 % of an H100's bfloat16 peak."""
    inside_node: float = 300e9
    """Bytes per second that it sends to its node's other devices."""
    between_nodes: float = 40e9
    """Bytes per second that it sends to other nodes."""

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e12:.0f} TFLOP/s a device, {self.inside_node / 1e9:.0f} GB/s inside a node, "
            f"{self.between_nodes / 1e9:.0f} GB/s between nodes"
        )


def tokens_per_s(facts: LayoutFacts, world: World, *, machine: Machine) -> float:
    """Returns the tokens of all ranks together per second."""
    shape, layout, batch = facts.shape, facts.layout, facts.batch
    tokens = batch.global_size * facts.positions
    matrices = shape.layers * shape.matrices_in_block(tp=1) + shape.vocabulary * shape.width
    # Six operations per number of a matrix; attention's two products look back half a sequence on average.
    operations = tokens * (6 * matrices + 6 * shape.layers * facts.positions * shape.width)
    share = facts.blocks(0) * layout.pp / shape.layers  # of the stage that has most
    again = _RECOMPUTED[facts.settings.activation_checkpointing]
    slower = again * share * (1 + _ROWS_AT_HALF_SPEED / facts.tokens)
    compute_s = operations * slower / (layout.world_size * machine.flops)
    waits, hidden = 0.0, 0.0
    for one in traffic(facts, world):
        sending_s = _sending_s(one, layout, world, machine=machine)
        if one.axis in ("dp_shard", "dp_replicate"):
            hidden += sending_s
        else:
            waits += sending_s
    waits += max(0.0, hidden - _HIDDEN * compute_s)
    idle = pipeline_bubble(layout, batch, stages_per_rank=facts.settings.stages_per_rank)
    return tokens / ((compute_s + waits) / (1 - idle))


def _sending_s(one: Traffic, layout: ParallelLayout, world: World, *, machine: Machine) -> float:
    """Returns how long a rank sends; of a group with several ranks on a node each carries a part to other nodes."""
    inside_s = one.num_bytes / machine.inside_node
    if not one.spans_nodes:
        return inside_s
    distance = math.prod(layout.degrees[AXES.index(one.axis) + 1 :])
    on_node: int = min(max(1, world.ranks_per_node[0] // distance), getattr(layout, one.axis))
    return max(inside_s if on_node > 1 else 0.0, one.num_bytes / (on_node * machine.between_nodes))
