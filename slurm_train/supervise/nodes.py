"""Which nodes of its job an attempt uses: each attempt chooses again, among the healthy nodes.

A job may hold more nodes than its ranks need (`cluster.spare_nodes`), and a run may use a range of node numbers
(`cluster.nodes=2-4`). One rule covers both: an attempt uses the largest number of nodes that the run can use and that
healthy nodes can fill. A node that was lost, or found bad, is not used again in this start of the job. A node that was
found bad before, in this run or in another, is used last. Pure: `srun` and `evidence` say which nodes are lost or bad.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from slurm_train.slurm.allocation import Allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """The nodes of a job, and how many of them an attempt can use."""

    nodes: tuple[str, ...]
    """All of them, in Slurm's order, in which it numbers the ranks of a step."""
    sizes: tuple[int, ...]
    """Numbers of nodes that an attempt can use, ascending."""
    ranks_per_node: tuple[int, ...]
    """In rank order, of the largest number of nodes."""
    tasks_per_node: tuple[int, ...]
    """Tasks of srun, likewise: a rank each, or a launcher of torchrun."""
    doubtful: frozenset[str] = frozenset()
    """Nodes that were found bad before."""
    outlives_nodes: bool = False
    """Whether Slurm leaves the job its other nodes when one is lost."""

    @classmethod
    def whole(cls, allocation: Allocation) -> NodePool:
        """Returns the pool of a job whose every task is a rank."""
        return cls(
            nodes=allocation.nodes,
            sizes=(allocation.num_nodes,),
            ranks_per_node=allocation.tasks_per_node,
            tasks_per_node=allocation.tasks_per_node,
        )

    @property
    def fewest(self) -> int:
        """How many nodes the job needs to start again: with a range of node numbers, spare nodes are optional."""
        return self.sizes[0] if len(self.sizes) > 1 else len(self.nodes)

    def choose(self, *, without: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the nodes of an attempt, in Slurm's order; () where too few are left.

        Args:
            without: nodes that are not healthy.
        """
        healthy = [node for node in self.nodes if node not in without]
        healthy.sort(key=lambda node: node in self.doubtful)
        count = max((size for size in self.sizes if size <= len(healthy)), default=0)
        chosen = set(healthy[:count])
        return tuple(node for node in self.nodes if node in chosen)

    def num_ranks(self, num_nodes: int) -> int:
        """Returns how many ranks an attempt on so many nodes has."""
        return sum(self.ranks_per_node[:num_nodes])
