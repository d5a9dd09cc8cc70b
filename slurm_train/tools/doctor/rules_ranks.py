"""What is wrong with ranks: who they are, what they may use. Pure; each rule yields its findings node by node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from slurm_train.distributed.rendezvous import files_needed
from slurm_train.tools.doctor.evidence import Asked, Evidence
from slurm_train.tools.doctor.facts import RankFacts
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.majority import as_ranges

_FEW_FILES = 1024
_LITTLE_LOCKED_MB = 64
# So many CPUs for each rank must lie idle before one bound CPU is called too few.
_PLENTY = 4


def rank_findings(evidence: Evidence, asked: Asked) -> Iterator[Finding]:
    """Yields RANK_MISMATCH, GPU_COUNT, CPU_AFFINITY and LIMITS."""
    yield from mismatches(evidence.ranks, asked)
    for node, ranks in _by_node(evidence.ranks).items():
        yield from _gpu_count(node, ranks, asked)
        yield from _affinity(node, ranks, asked, num_cpus=_num_cpus(evidence, node))
        yield from _limits(node, ranks, has_infiniband=_has_infiniband(evidence, node))


def mismatches(ranks: Sequence[RankFacts], asked: Asked) -> Iterator[Finding]:
    """Yields RANK_MISMATCH; a rank can ask this of itself alone, before it looks for others."""
    todo = "look for RANK, WORLD_SIZE or SLURM_* set by a module, a prolog or a shell's start file on the nodes"
    for rank in ranks:
        if rank.slurm_rank is not None and rank.slurm_rank != rank.rank:
            seen = f"the task that Slurm calls rank {rank.slurm_rank} has RANK={rank.rank} in its environment"
            yield Finding(code="RANK_MISMATCH", level="error", node=rank.node, seen=seen, todo=todo)
        elif rank.world_size != asked.world_size:
            seen = f"rank {rank.rank} counts {rank.world_size} ranks, the run was planned for {asked.world_size}"
            yield Finding(code="RANK_MISMATCH", level="error", node=rank.node, seen=seen, todo=todo)
    yield from _twice(ranks, todo)


def _twice(ranks: Sequence[RankFacts], todo: str) -> Iterator[Finding]:
    places = defaultdict(list)
    for rank in ranks:
        places[rank.node, rank.local_rank].append(rank.rank)
    for (node, local_rank), numbers in places.items():
        if len(numbers) > 1:
            seen = f"ranks {as_ranges(numbers)} all have local rank {local_rank}, so they would share a GPU"
            yield Finding(code="RANK_MISMATCH", level="error", node=node, seen=seen, todo=todo)


def _gpu_count(node: str, ranks: Sequence[RankFacts], asked: Asked) -> Iterator[Finding]:
    visible = [rank.visible_gpus for rank in ranks if rank.visible_gpus is not None]
    # There is a rank for each GPU, and not every node need have as many as another.
    wanted = min([asked.gpus_per_node, *(rank.local_world_size for rank in ranks)])
    if not wanted or not visible or max(visible) >= wanted:
        return
    yield Finding(
        code="GPU_COUNT",
        level="error",
        node=node,
        seen=f"{max(visible)} GPUs are visible to the ranks, {wanted} were asked for",
        todo="see CUDA_VISIBLE_DEVICES and the srun flags there; `scontrol show node` says what Slurm counts",
        blames_node=True,
    )


def _affinity(node: str, ranks: Sequence[RankFacts], asked: Asked, *, num_cpus: int) -> Iterator[Finding]:
    bound = {cpu for rank in ranks for cpu in rank.cpus}
    if not bound or not num_cpus:
        return
    fewest = min(ranks, key=lambda rank: len(rank.cpus))
    wanted = min(asked.cpus_per_gpu or 1, num_cpus)
    todo = "set cluster.cpus_per_gpu, and look at --cpu-bind and TaskPlugin where it is set"
    if len(bound) < min(len(ranks), num_cpus):
        cpus = f"CPU {as_ranges(list(bound))}"
        seen = f"{len(ranks)} ranks may use nothing but {cpus} of {num_cpus}"
        yield Finding(code="CPU_AFFINITY", level="warning", node=node, seen=seen, todo=todo)
    elif len(fewest.cpus) < wanted:
        seen = f"rank {fewest.rank} may use {len(fewest.cpus)} CPUs, cluster.cpus_per_gpu={asked.cpus_per_gpu} asked"
        yield Finding(code="CPU_AFFINITY", level="warning", node=node, seen=seen, todo=todo)
    elif asked.cpus_per_gpu is None and len(fewest.cpus) == 1 and num_cpus >= _PLENTY * max(len(ranks), 1):
        seen = f"each rank has 1 of {num_cpus} CPUs, for its loader workers as well"
        yield Finding(code="CPU_AFFINITY", level="warning", node=node, seen=seen, todo=todo)


def _limits(node: str, ranks: Sequence[RankFacts], *, has_infiniband: bool) -> Iterator[Finding]:
    lowest = min((rank.max_open_files for rank in ranks if rank.max_open_files is not None), default=None)
    needed = files_needed(max((rank.world_size for rank in ranks), default=1))
    if lowest is not None and lowest < max(needed, _FEW_FILES):
        is_short = lowest < needed
        yield Finding(
            code="LIMITS",
            level="error" if is_short else "warning",
            node=node,
            seen=f"a rank may open {lowest} files, {'it needs' if is_short else 'usual are'} {max(needed, _FEW_FILES)}",
            todo="Slurm passes the limits of the shell that submits on: `ulimit -n 65536` there, or in cluster.setup",
        )
    locked = min((rank.max_locked_mb for rank in ranks if rank.max_locked_mb is not None), default=None)
    if has_infiniband and locked is not None and locked < _LITTLE_LOCKED_MB:
        yield Finding(
            code="LIMITS",
            level="warning",
            node=node,
            seen=f"a rank may lock {locked} MiB of memory, and InfiniBand has to lock its buffers",
            todo="`ulimit -l unlimited` before submitting, or ask for LimitMEMLOCK=infinity in slurmd's service",
        )


def _by_node(ranks: Sequence[RankFacts]) -> dict[str, list[RankFacts]]:
    found = defaultdict(list)
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        found[rank.node].append(rank)
    return dict(found)


def _num_cpus(evidence: Evidence, node: str) -> int:
    return next((facts.num_cpus for facts in evidence.nodes if facts.node == node), 0)


def _has_infiniband(evidence: Evidence, node: str) -> bool:
    return any(facts.network.has_infiniband for facts in evidence.nodes if facts.node == node)
