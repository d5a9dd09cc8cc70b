"""How many ranks run where: on the cluster that was asked for, or on this machine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.config.schema import RunConfig
from slurm_train.errors import ConfigError


@dataclass(frozen=True, slots=True)
class World:
    """Ranks per node, in rank order."""

    ranks_per_node: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks_per_node)

    @property
    def size(self) -> int:
        """World size: ranks in all."""
        return sum(self.ranks_per_node)

    @property
    def is_even(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len(set(self.ranks_per_node)) == 1


def plan_world(config: RunConfig, env: Mapping[str, str]) -> World:
    """Returns the world that a configuration asks for.

    Args:
        config: the run's configuration.
        env: environment; CUDA_VISIBLE_DEVICES limits the GPUs of a local run.

    Raises:
        ConfigError: counts below one, or a GPU list that does not name every node.
    """
    cluster = config.cluster
    if cluster is None:
        asked = config.run.processes
        processes = (count_local_gpus(env) or 2) if asked is None else asked
        _require_positive("run.processes", processes)
        return World((processes,))
    _require_positive("cluster.nodes", cluster.nodes)
    gpus = cluster.gpus_per_node
    per_node = (gpus,) * cluster.nodes if isinstance(gpus, int) else tuple(gpus)
    for count in per_node:
        _require_positive("cluster.gpus_per_node", count)
    if len(per_node) != cluster.nodes:
        raise ConfigError(
            f"cluster.gpus_per_node={list(per_node)} names {len(per_node)} nodes, cluster.nodes={cluster.nodes}",
            hint=f"set cluster.nodes={len(per_node)}, or give one number for all nodes",
        )
    if len(set(per_node)) > 1:
        raise ConfigError(
            f"cluster.gpus_per_node={list(per_node)} asks for uneven nodes, which this version does not launch",
            hint=f"use the same number on every node, e.g. cluster.gpus_per_node={min(per_node)}",
        )
    return World(per_node)


def count_local_gpus(env: Mapping[str, str]) -> int:
    """Returns the number of GPUs that this machine offers, without importing torch."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return 0
    listing = subprocess.run(
        ["nvidia-smi", "-L"], env=dict(env), capture_output=True, text=True, timeout=20, check=False
    )
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _require_positive(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key}={value} leaves nothing to run on", hint=f"set {key} to 1 or more")
