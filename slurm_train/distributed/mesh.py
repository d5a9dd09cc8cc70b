"""The device mesh of a layout: the one module that makes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh

from slurm_train.config.layout import AXES, ParallelLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_mesh(layout: ParallelLayout, *, device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks, with every axis of `AXES` by name, those of degree one too. Collective.

    Args:
        layout: the degrees; rank numbers run through the last axis first, as torch lays a mesh out.
        device: this rank's; its kind decides what carries the exchanges.
    """
    return init_device_mesh(device.type, layout.degrees, mesh_dim_names=AXES)


def sharding_mesh(mesh: DeviceMesh, layout: ParallelLayout) -> DeviceMesh:
    """Returns the axes that parameters are sharded over, behind the one that copies of them lie along. Collective."""
    axis = "cp" if layout.dp_shard == 1 < layout.cp else "dp_shard"
    if layout.dp_shard > 1 and layout.cp > 1:
        axis = "shard"
        mesh["dp_shard", "cp"]._flatten(axis)
    return mesh[axis] if layout.dp_replicate == 1 else mesh["dp_replicate", axis]
