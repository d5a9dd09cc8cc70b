"""How many ranks run where: on the cluster that was asked for, or on this machine."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.slurm.commands import run_program

_LISTING_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes next to each other in rank order that have equally many ranks."""

    num_nodes: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True)
class World:
    """Ranks per node, in rank order."""

    ranks_per_node: tuple[int, ...]
    """Of the largest world, where Slurm may grant fewer nodes."""
    min_nodes: int | None = None
    """The fewest nodes that will do; None: all of them."""

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

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The nodes in rank order, equal neighbours put together: (4, 4, 2) is 2 nodes of 4 and 1 of 2."""
        return tuple(NodeGroup(len(list(same)), ranks) for ranks, same in itertools.groupby(self.ranks_per_node))

    @property
    def nodes_in_words(self) -> str:
        """Returns the nodes for a person, e.g. "4 nodes x 8", "2 nodes of 4 + 2", "2 to 4 nodes x 8"."""
        if not self.is_even:
            return f"{self.num_nodes} nodes of {' + '.join(map(str, self.ranks_per_node))}"
        count = str(self.num_nodes) if self.min_nodes is None else f"{self.min_nodes} to {self.num_nodes}"
        return f"{count} node{'s' * (self.num_nodes > 1)} x {self.ranks_per_node[0]}"

    def possible(self) -> Iterator[World]:
        """Yields every world that Slurm may grant, the smallest first."""
        for count in range(self.num_nodes if self.min_nodes is None else self.min_nodes, self.num_nodes + 1):
            yield World(self.ranks_per_node[:count])


def plan_world(config: RunConfig, env: Mapping[str, str]) -> World:
    """Returns the world that a configuration asks for.

    Args:
        config: the run's configuration.
        env: environment; CUDA_VISIBLE_DEVICES limits the GPUs of a local run.

    Raises:
        ConfigError: a GPU list that does not name every node, uneven nodes in an allocation of one's
            own, or a range of nodes where the number of ranks cannot change.
    """
    cluster = config.cluster
    if cluster is None:
        asked = config.run.processes
        processes = (count_local_gpus(env) or 2) if asked is None else asked
        return World((processes,))
    fewest, most = _read_nodes(cluster.nodes)
    gpus = cluster.gpus_per_node
    per_node = (gpus,) * most if isinstance(gpus, int) else tuple(gpus)
    if len(per_node) != most:
        raise ConfigError(
            f"cluster.gpus_per_node={list(per_node)} names {len(per_node)} nodes, cluster.nodes={cluster.nodes}",
            hint=f"set cluster.nodes={len(per_node)}, or give one number for all nodes",
        )
    if config.launch == "interactive" and len(set(per_node)) > 1:
        raise ConfigError(
            f"cluster.gpus_per_node={list(per_node)} is a heterogeneous job, and launch=interactive runs in "
            "allocations of equal nodes only",
            hint="drop launch=interactive to submit a job, or give one number of GPUs for all nodes",
        )
    if fewest is None:
        return World(per_node)
    _require_elastic(cluster, is_even=len(set(per_node)) == 1)
    return World(per_node, min_nodes=fewest)


def _read_nodes(nodes: int | str) -> tuple[int | None, int]:
    """Returns the fewest nodes, None where the number is fixed, and the most."""
    if isinstance(nodes, int):
        return None, nodes
    match = re.fullmatch(r"([1-9]\d{0,4})-([1-9]\d{0,4})", nodes)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"cluster.nodes={nodes!r} is neither a number nor a range",
            hint="write cluster.nodes=4, or cluster.nodes=2-4",
        )
    return (None if match[1] == match[2] else int(match[1])), int(match[2])


def _require_elastic(cluster: ClusterSection, *, is_even: bool) -> None:
    if cluster.launcher != "torchrun":
        raise ConfigError(
            f"cluster.nodes={cluster.nodes} leaves the number of nodes open, but srun is told how many ranks to start",
            hint="add cluster.launcher=torchrun, or give one number of nodes",
        )
    if not is_even:
        raise ConfigError(
            f"cluster.nodes={cluster.nodes} leaves the number of nodes open, and cluster.gpus_per_node names them",
            hint="give one number of GPUs for all nodes, or one number of nodes",
        )


def count_local_gpus(env: Mapping[str, str]) -> int:
    """Returns the number of GPUs that this machine offers, without importing torch.

    Raises:
        ConfigError: nvidia-smi hangs or cannot be started.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return count_visible(visible)
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return 0
    try:
        listing = run_program(["nvidia-smi", "-L"], env=env, timeout_s=_LISTING_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ConfigError(
            f"the GPUs of this machine cannot be counted: {err}",
            hint="name them with CUDA_VISIBLE_DEVICES=0,1 (empty: train on the CPU), or reset the hanging driver",
        ) from err
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def count_visible(devices: str) -> int:
    """Returns how many devices a value of CUDA_VISIBLE_DEVICES names."""
    return len([device for device in devices.split(",") if device.strip() not in ("", "-1")])
