"""What is known when the verdict is due, and what the job should be like: the two sides that a diagnosis compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.tools.doctor.facts import NodeFacts, ProbeFacts, RankFacts, SpeedFacts, Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """Where rank 0 listens."""

    asked: int
    """The first candidate: MASTER_PORT."""
    bound: int
    """The one that was free; 0 if none."""
    holder: str = ""
    """Who holds the first one, where that can be told, e.g. "pid 7 (python)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known when the verdict is due."""

    ranks: Sequence[RankFacts] = ()
    nodes: Sequence[NodeFacts] = ()
    probes: Sequence[ProbeFacts] = ()
    speeds: Sequence[SpeedFacts] = ()
    troubles: Sequence[Trouble] = ()
    port: PortFacts | None = None
    silent: Sequence[str] = ()
    """Nodes of which some ranks never came."""
    mute: Sequence[str] = ()
    """Nodes that came, and whose reports did not arrive."""
    late: Sequence[str] = ()
    """Nodes that came, and did not answer what they were asked in time."""
    waited_s: float = 0.0
    """How long was waited for those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the job should be like."""

    nodes: tuple[str, ...]
    """In rank order; the first is rank 0's."""
    world_size: int
    gpus_per_node: int = 0
    """GPUs asked of Slurm, on the node that has most; 0: none."""
    cpus_per_gpu: int | None = None
    needs_port: bool = False
    """Whether MASTER_PORT itself has to be free, as a script of one's own expects."""
    local_ranks: int = 1
    """Ranks on each node."""
