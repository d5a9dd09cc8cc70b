"""Which of the ranks of its job this process is, read from an environment mapping.

RANK and its kin, which a local launch sets for the processes it starts, win over Slurm's task variables, which win
over a world of one. Imports no torch, so it runs before anything slow does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from slurm_train.errors import ClusterError
from slurm_train.slurm.allocation import TaskPlace
from slurm_train.slurm.job_variables import node_name

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One rank, and its node."""

    rank: int
    """0 to world_size - 1, node after node."""
    local_rank: int
    """0 to local_world_size - 1 on this node."""
    node_rank: int
    """Position of this node in the job."""
    world_size: int
    """Ranks of the job."""
    local_world_size: int
    """Ranks of this node; nodes may differ."""
    host: str
    """Name of this node, Slurm's own where there is one: what `--exclude` wants."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides, writes and prints for all."""
        return self.rank == 0

    @property
    def spans_nodes(self) -> bool:
        """Whether the world reaches beyond this node."""
        return self.local_world_size < self.world_size

    @classmethod
    def from_env(cls, env: Mapping[str, str], *, host: str | None = None) -> RankPlace:
        """Returns the place that an environment describes.

        Args:
            env: SLURM_PROCID and its kin, or RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, or neither.
            host: name of this node; default: Slurm's name of it, outside a job the host name.

        Raises:
            ClusterError: a variable is missing, not a number, or contradicts another.
        """
        here = host or node_name(env)
        # A local launch typed inside `srun --pty bash` has both; there SLURM_PROCID is the shell's, not the rank's.
        if "RANK" not in env:
            if "SLURM_PROCID" in env:
                return cls(**asdict(TaskPlace.from_env(env)), host=here)
            return cls(rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, host=here)
        rank, local_rank, world, local_world = (_number(env, name) for name in _TORCHRUN)
        if not (0 <= local_rank < local_world <= world and local_rank <= rank < world):
            variables = ", ".join(f"{name}={env[name]}" for name in _TORCHRUN)
            raise ClusterError(
                f"these rank variables contradict each other: {variables}", hint="unset them all, or fix them"
            )
        node_rank = _number(env, "GROUP_RANK") if "GROUP_RANK" in env else rank // local_world
        return cls(
            rank=rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=world,
            local_world_size=local_world,
            host=here,
        )


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise ClusterError(
            f"RANK is set, but {name} is not", hint=f"set {', '.join(_TORCHRUN)} together, or none of them"
        ) from None
    except ValueError:
        raise ClusterError(f"{name}={env[name]!r} is not a number", hint=f"unset {name}") from None
