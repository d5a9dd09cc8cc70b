"""How many ranks run on which node, and how they share one run; impossible layouts are refused before anything runs.

The checks need neither a GPU nor torch; a model of the user's own is checked further when it is built.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurm_train.config.batch import BatchPlan
from slurm_train.config.parallel import AXES, ParallelLayout, solve_layout
from slurm_train.config.program import program_of
from slurm_train.config.schema import CAUSAL_LM, GPT_TARGET, RunConfig
from slurm_train.errors import BatchError, Check, ConfigError, require_all
from slurm_train.formatting import shorten
from slurm_train.slurm.commands import run_program
from slurm_train.slurm.devices import installed_gpus, visible_gpus

_LISTING_TIMEOUT_S = 20.0
_CNN = "slurm_train.models.cnn.CNN"
"""The target of model=hf."""

# --- the world: ranks on nodes ---


@dataclass(frozen=True, slots=True)
class EqualNodes:
    """Nodes next to each other in rank order that have equally many ranks."""

    num_nodes: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True)
class World:
    """Ranks per node, in rank order."""

    ranks_per_node: tuple[int, ...]
    """For a range of nodes, that of the largest world."""
    node_counts: tuple[int, ...] = ()
    """For a range of nodes, the numbers of nodes that the run can use, ascending; (): all nodes."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks_per_node)

    @property
    def num_ranks(self) -> int:
        """Ranks in all: the world size."""
        return sum(self.ranks_per_node)

    @property
    def is_even(self) -> bool:
        """Whether every node has the same number of ranks."""
        return self.ranks_per_node.count(self.ranks_per_node[0]) == len(self.ranks_per_node)

    @property
    def groups(self) -> tuple[EqualNodes, ...]:
        """The nodes in rank order, with equal neighbours in one group: (4, 4, 2) is 2 nodes of 4 and 1 of 2."""
        return tuple(EqualNodes(len(list(nodes)), ranks) for ranks, nodes in itertools.groupby(self.ranks_per_node))

    @property
    def nodes_in_words(self) -> str:
        """The nodes for a person, e.g. "4 nodes x 8", "2 nodes of 4 + 2", "2 to 4 nodes x 8"."""
        if not self.is_even:
            return f"{self.num_nodes} nodes of {' + '.join(map(str, self.ranks_per_node))}"
        count = str(self.num_nodes)
        if self.node_counts == tuple(range(self.fewest_nodes, self.num_nodes + 1)):
            count = f"{self.fewest_nodes} to {self.num_nodes}"
        elif self.node_counts:
            count = f"{', '.join(map(str, self.node_counts[:-1]))} or {self.num_nodes}"
        return f"{count} node{'s' * (self.num_nodes > 1)} x {self.ranks_per_node[0]}"

    @property
    def fewest_nodes(self) -> int:
        """The smallest number of nodes that the run can use."""
        return self.node_counts[0] if self.node_counts else self.num_nodes

    def possible(self) -> Iterator[World]:
        """Yields every world that the run may be trained on, the smallest first."""
        for count in self.node_counts or (self.num_nodes,):
            yield World(self.ranks_per_node[:count])


def plan_world(config: RunConfig, env: Mapping[str, str]) -> World:
    """Returns the world that a configuration asks for.

    Args:
        config: the run's configuration.
        env: environment; CUDA_VISIBLE_DEVICES and the like limit the GPUs of a local run.

    Raises:
        ConfigError: a GPU list that does not name every node, uneven nodes in an allocation of one's own, or a range of
            uneven nodes.
    """
    cluster = config.slurm
    if not config.uses_cluster:
        num_ranks = config.run.processes
        if num_ranks is None:
            num_ranks = count_local_gpus(env) or 2
        return World((num_ranks,))
    fewest, num_nodes = _read_nodes(cluster.nodes)
    gpus = cluster.gpus_per_node
    per_node = (gpus,) * num_nodes if isinstance(gpus, int) else tuple(gpus)
    is_even = len(set(per_node)) == 1
    shown = f"cluster.gpus_per_node={list(per_node)}"
    require_all(
        [
            (
                len(per_node) != num_nodes,
                f"{shown} names {len(per_node)} nodes, cluster.nodes={cluster.nodes}",
                f"set cluster.nodes={len(per_node)}, or give one number for all nodes",
            ),
            (
                config.launch == "interactive" and not is_even,
                f"{shown} is a heterogeneous job, and launch=interactive runs in allocations of equal nodes only",
                "drop launch=interactive to submit a job, or give one number of GPUs for all nodes",
            ),
            (
                cluster.spare_nodes > 0 and (not is_even or cluster.launcher == "torchrun"),
                f"cluster.spare_nodes={cluster.spare_nodes} needs equal nodes and srun: a component of a heterogeneous "
                "job keeps its nodes, and torchrun starts its ranks again by itself",
                "give one number of GPUs for all nodes and leave cluster.launcher at srun, or drop spare_nodes",
            ),
            (
                cluster.outlives_nodes and bool({"nodelist", "exclude", "w", "x"} & set(cluster.srun)),
                "each attempt chooses its nodes (cluster.spare_nodes, or a range of cluster.nodes), and cluster.srun "
                "names them",
                "name nodes with cluster.nodelist or cluster.exclude, or give one number of nodes without spare ones",
            ),
            (
                fewest is not None and cluster.launcher == "srun" and cluster.gpu_flag == "gpus-per-task",
                f"cluster.gpu_flag=gpus-per-task needs the number of tasks, which cluster.nodes={cluster.nodes} leaves "
                "open",
                "use another cluster.gpu_flag, or give one number of nodes",
            ),
            (
                fewest is not None and not is_even,
                f"cluster.nodes={cluster.nodes} leaves the number of nodes open, and cluster.gpus_per_node names them",
                "give one number of GPUs for all nodes, or one number of nodes",
            ),
        ]
    )
    return World(per_node, node_counts=() if fewest is None else tuple(range(fewest, num_nodes + 1)))


def _read_nodes(nodes: int | str) -> tuple[int | None, int]:
    """Returns the smallest number of nodes, None if the number is fixed, and the largest."""
    if isinstance(nodes, int):
        return None, nodes
    match = re.fullmatch(r"([1-9]\d{0,4})-([1-9]\d{0,4})", nodes)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"cluster.nodes must be a number or a range, got {nodes!r}",
            hint="write cluster.nodes=4, or cluster.nodes=2-4",
        )
    return (None if match[1] == match[2] else int(match[1])), int(match[2])


def count_local_gpus(env: Mapping[str, str], *, devices: Path = Path("/dev"), sys: Path = Path("/sys")) -> int:
    """Returns the number of GPUs that this machine offers, without importing torch.

    Args:
        env: environment; CUDA_VISIBLE_DEVICES and the variables of other vendors limit them.
        devices: where the drivers have their files.
        sys: where the kernel shows its devices.

    Raises:
        ConfigError: nvidia-smi hangs or cannot be started.
    """
    visible = visible_gpus(env)
    if visible is not None:
        return len(visible)
    if shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return sum(gpu.vendor == "AMD" for gpu in installed_gpus(devices=devices, sys=sys))
    try:
        listing = run_program(["nvidia-smi", "-L"], env=env, timeout_s=_LISTING_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ConfigError(
            f"the GPUs of this machine cannot be counted: {err}",
            hint="name them with CUDA_VISIBLE_DEVICES=0,1 (empty: train on the CPU), or reset the hanging driver",
        ) from err
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


# --- the layout: which ranks share what ---


def fitting_world(config: RunConfig, world: World) -> World:
    """Drops the numbers of nodes that the layout cannot use fully.

    Args:
        config: the run's configuration.
        world: its ranks.

    Raises:
        ConfigError: the layout does not fit the smallest or the largest number of nodes, so that another range must be
            set; or, under torchrun, a number between them, which torchrun would use anyway.
    """
    if not world.node_counts:
        # A layout that does not fit a fixed number of nodes is refused by `plan_layout`.
        return world
    sizes = list[int]()
    problem: ConfigError | None = None
    for part in world.possible():
        try:
            plan_layout(config, part)
            sizes.append(part.num_nodes)
        except ConfigError as err:
            problem = problem or err
    if problem is None:
        return world
    is_between = len(sizes) > 1 and (sizes[0], sizes[-1]) == (world.fewest_nodes, world.num_nodes)
    if is_between and config.slurm.launcher == "srun":
        return replace(world, node_counts=tuple(sizes))
    fit = f"it fits {', '.join(map(str, sizes))} of them" if sizes else "it fits none of them"
    nodes = f"{world.fewest_nodes}-{world.num_nodes}"
    fitting_range = "-".join(map(str, dict.fromkeys([sizes[0], sizes[-1]]))) if sizes else ""
    raise ConfigError(
        f"the layout does not fit each number of nodes that cluster.nodes={nodes} may give: {fit}; {problem.message}",
        hint=f"set cluster.nodes={fitting_range}" if fitting_range else problem.hint,
    )


def plan_layout(config: RunConfig, world: World) -> ParallelLayout:
    """Returns the degree of each axis of parallelism, checked against world and model.

    Long because it is a table of independent refusals.

    Args:
        config: the run's configuration.
        world: how many ranks run on which node.

    Raises:
        ConfigError: the degrees do not fit the world, the nodes or the model, or this version cannot do it.
    """
    settings = config.parallel
    layout = solve_layout(settings, world_size=world.num_ranks)
    require_all(
        [
            (
                settings.sequence_parallel and layout.tp == 1,
                f"parallel.sequence_parallel=true splits positions among the ranks of tp, and the layout is {layout}",
                "set parallel.tp=2 or more, or leave sequence_parallel out; parallel.cp cuts sequences without tp",
            ),
            (
                settings.async_tp and not (settings.sequence_parallel and config.train.compile is not False),
                "parallel.async_tp=true overlaps what compiled blocks exchange by positions, got "
                f"parallel.sequence_parallel={str(settings.sequence_parallel).lower()} and "
                f"train.compile={str(config.train.compile).lower()}",
                "set parallel.sequence_parallel=true and leave train.compile at auto, or leave async_tp out",
            ),
            (
                settings.cpu_offload and layout.shard_size == 1,
                f"parallel.cpu_offload=true keeps sharded parameters in host memory, and the layout is {layout}",
                "set parallel.dp_shard=2 or more, or leave cpu_offload out",
            ),
        ]
    )
    if layout.is_replicated:
        return layout
    stages_per_rank = settings.stages_per_rank if layout.pp > 1 else 1
    has_two_parts = layout.pp > 1 and settings.pipeline_schedule == "zero_bubble"
    misfit = next((count for count in sorted(set(world.ranks_per_node)) if count % layout.tp), None)
    require_all(
        [
            (
                program_of(config).used.parallel != settings,
                f"parallel asks for {layout}, but a task or script of your own has to make its own groups",
                "leave parallel.* at its defaults; ranks find their numbers and rank 0's address in the environment",
            ),
            (
                config.ddp.comm != "none",
                f"ddp.comm={config.ddp.comm} sends less of whole gradients, which {layout} does not exchange",
                "leave ddp.comm at none, or parallel.* alone",
            ),
            (
                config.ddp.find_unused_parameters,
                f"ddp.find_unused_parameters=true is a setting of DDP, and the layout is {layout}",
                "leave it out: shards may lack gradients",
            ),
            (
                misfit is not None and world.num_nodes > 1 and not settings.allow_tp_across_nodes,
                f"parallel.tp={layout.tp} does not fit into nodes of {misfit} ranks: every layer would wait for the "
                "network",
                "choose a tp that divides the ranks of a node, or parallel.allow_tp_across_nodes=true",
            ),
            *_model_checks(layout, config.model or {}, stages=layout.pp * stages_per_rank),
            *_position_checks(layout, config),
            (
                stages_per_rank > 1 and settings.pipeline_schedule == "gpipe",
                f"parallel.stages_per_rank={stages_per_rank} needs the 1f1b order, got "
                f"parallel.pipeline_schedule={settings.pipeline_schedule}",
                "several stages on a rank are interleaved in 1f1b order: leave pipeline_schedule out",
            ),
            (
                # torch reads the weights after the gradients of activations, when they are shards again (2.13).
                has_two_parts and layout.reducing_size > 1 and settings.reshard_after_forward,
                f"parallel.pipeline_schedule=zero_bubble needs gathered weights in the backward pass, and {layout} "
                "with parallel.reshard_after_forward=true frees them before",
                "set parallel.reshard_after_forward=false, or leave pipeline_schedule out",
            ),
            (
                has_two_parts and config.train.compile is not False,
                f"parallel.pipeline_schedule=zero_bubble cuts the backward pass in two, got train.compile="
                f"{str(config.train.compile).lower()}",
                "torch cannot cut compiled blocks: set train.compile=false, or leave pipeline_schedule out",
            ),
            (
                has_two_parts and settings.activation_checkpointing != "none",
                "parallel.pipeline_schedule=zero_bubble cuts the backward pass in two, got "
                f"parallel.activation_checkpointing={settings.activation_checkpointing}",
                "blocks would be computed again for each part: leave one of them out",
            ),
        ]
    )
    return layout


def _model_checks(layout: ParallelLayout, model: Mapping[str, Any], *, stages: int) -> Iterator[Check]:
    target = model.get("_target_")
    yield (
        target == _CNN and layout.tp * layout.pp * layout.cp > 1,
        f"parallel asks for {layout}, which the CNN does not support",
        "use dp_replicate and dp_shard, or model=gpt",
    )
    yield (
        target == CAUSAL_LM and layout.pp > 1,
        f"parallel asks for {layout}, but model=hf has no pipeline stages",
        "use dp_replicate, dp_shard and tp, or the shipped GPT: model=llama3-8b",
    )
    yield (
        target == CAUSAL_LM and layout.tp > 1 and bool(model.get("lora")),
        f"parallel.tp={layout.tp} was asked, and model.lora puts adapters around the matrices that it would cut",
        "leave parallel.tp at 1; parallel.dp_shard spreads adapters and model",
    )
    if target != GPT_TARGET:
        return
    layers = int(model.get("num_layers", 4))
    yield (
        layers < stages,
        f"parallel asks for {stages} stages, but model.num_layers={layers} leaves some without a block",
        f"choose a parallel.pp x parallel.stages_per_rank of at most {layers}",
    )
    yield (
        layout.pp > 1 and bool(model.get("tied", True)),
        "parallel.pp was asked, but model.tied=true makes embedding and head one weight, in two stages",
        "set model.tied=false",
    )
    width = int(model.get("width", 160))
    heads = int(model.get("num_heads", 4))
    sizes = {
        "num_heads": heads,
        "num_kv_heads": int(model.get("num_kv_heads", 0)) or heads,
        "hidden": int(model.get("hidden", 0)) or 4 * width,
    }
    for name, value in sizes.items():
        yield (
            value % layout.tp != 0,
            f"parallel.tp={layout.tp} cannot cut model.{name}={value} into equal parts",
            f"choose a tp that divides {value}, or set model.{name} to a multiple of {layout.tp}",
        )


def _position_checks(layout: ParallelLayout, config: RunConfig) -> Iterator[Check]:
    """Yields the checks of split sequences; a model of the user's own is checked when it is built."""
    model = config.model or {}
    splits = config.parallel.sequence_parallel
    if layout.cp == 1 and not splits:
        return
    setting = f"parallel.cp={layout.cp}" if layout.cp > 1 else "parallel.sequence_parallel=true"
    yield (
        config.batch.by_length,
        f"{setting} was asked with batch.by_length=true, whose sequences have different lengths",
        "leave batch.by_length at false, or use dp_replicate, dp_shard and tp",
    )
    yield (
        model.get("_target_") == CAUSAL_LM,
        f"{setting} was asked, but model=hf cannot split sequences",
        "use dp_replicate, dp_shard and tp, or the shipped GPT: model=llama3-8b",
    )
    if model.get("_target_") != GPT_TARGET:
        return
    key = "data.context" if (config.data or {}).get("context") else "model.context"
    context = positions_of(config.data, default=int(model.get("context", 256)))
    chunks = 2 * layout.cp
    yield (
        layout.cp > 1 and context % chunks != 0,
        f"parallel.cp={layout.cp} cannot cut {key}={context} into {chunks} equal chunks",
        f"set {key} to a multiple of {chunks}",
    )
    yield (
        splits and context // layout.cp % layout.tp != 0,
        f"parallel.sequence_parallel cannot split {context // layout.cp} positions among tp {layout.tp} ranks",
        f"set {key} to a multiple of {math.lcm(chunks if layout.cp > 1 else 1, layout.cp * layout.tp)}",
    )


def positions_of(data: Mapping[str, Any] | None, *, default: int) -> int:
    """Returns the positions of one sample, by the data, whose samples may be shorter than the model's context."""
    return int((data or {}).get("context") or default)


def check_pipeline(config: RunConfig, layout: ParallelLayout, batch: BatchPlan) -> None:
    """Refuses a number of micro-batches that torch's interleaved schedule cannot divide into equal rounds.

    Raises:
        BatchError: the number is not a multiple of the rounds.
    """
    is_plain = config.parallel.stages_per_rank == 1 and config.parallel.pipeline_schedule != "zero_bubble"
    if layout.pp == 1 or is_plain:
        return
    if batch.accumulation % max(1, batch.accumulation // layout.pp):
        raise BatchError(
            f"interleaved stages on {layout.pp} ranks need rounds of equally many micro-batches, the batch is "
            f"{batch.as_sum()}",
            hint=f"set batch.accumulation to a multiple of {layout.pp}",
        )


def pipeline_bubble(
    layout: ParallelLayout, batch: BatchPlan, *, stages_per_rank: int = 1, schedule: str = "1f1b"
) -> float:
    """Returns the part of a step in which a rank idles: (ranks - 1) of (stages x micro-batches + ranks - 1) turns.

    A turn is a forward pass and both parts of its backward pass, which are assumed to take equally long; zero_bubble
    idles for one of the three.
    """
    idle = (layout.pp - 1) / (3 if schedule == "zero_bubble" else 1)
    return idle / (stages_per_rank * batch.accumulation + idle)


def spans_nodes(layout: ParallelLayout, world: World, axis: str) -> bool:
    """Returns whether some group of an axis spans more than one node."""
    if world.is_even:
        members = math.prod(layout.degrees[AXES.index(axis) :])
        # The members of a group and the ranks between them are that many consecutive ranks.
        return getattr(layout, axis) > 1 and world.ranks_per_node[0] % members != 0
    node_of_rank: list[int] = []
    for node, count in enumerate(world.ranks_per_node):
        node_of_rank += [node] * count
    return any(_num_places(group, node_of_rank) > 1 for group in layout.groups((axis,)))


def ranks_on_node(layout: ParallelLayout, world: World, axis: str) -> int:
    """Returns how many ranks of a group of an axis are on one node, at least 1."""
    distance = math.prod(layout.degrees[AXES.index(axis) + 1 :])
    degree: int = getattr(layout, axis)
    return min(max(1, world.ranks_per_node[0] // distance), degree)


def _num_places(ranks: Iterable[int], place_of_rank: Sequence[int | str]) -> int:
    """Returns over how many nodes, switches or blocks some ranks are spread."""
    return len({place_of_rank[rank] for rank in ranks})


def topology_text(
    layout: ParallelLayout, world: World, *, nodes: Sequence[str], leaf_of: Mapping[str, str], may_ask: bool
) -> str:
    """Returns to which switches or blocks the nodes of a run belong, and how many groups of ranks span several.

    Args:
        layout: the degrees of each axis.
        world: the ranks on each node.
        nodes: the nodes in rank order, e.g. ("node1", "node2").
        leaf_of: the switch or block of each node, e.g. {"node1": "switch leaf1"}.
        may_ask: whether to name the setting that asks for one switch.

    Returns:
        E.g. "nodes on switch a: 1, switch b: 1; groups of ranks on several: tp 0 of 2, dp_shard 2 of 2"; "" where
        the switch or block of some node is not known.
    """
    if len(nodes) != world.num_nodes or any(node not in leaf_of for node in nodes):
        return ""
    leaves = [leaf_of[node] for node in nodes]
    num_nodes = Counter(leaves)
    text = shorten((f"{leaf}: {count}" for leaf, count in num_nodes.items()), 6)
    if len(num_nodes) == 1:
        return f"all nodes on {leaves[0]}"
    leaf_of_rank: list[str] = []
    for leaf, count in zip(leaves, world.ranks_per_node, strict=True):
        leaf_of_rank += [leaf] * count
    crossings = []
    for axis in reversed(AXES):
        if getattr(layout, axis) <= 1:
            continue
        groups = list(layout.groups((axis,)))
        num_crossing = sum(_num_places(group, leaf_of_rank) > 1 for group in groups)
        crossings.append(f"{axis} {num_crossing} of {len(groups)}")
    text = f"nodes on {text}; groups of ranks on several: {', '.join(crossings)}"
    largest = max(Counter(leaf_of.values()).values())
    if may_ask and leaves[0].startswith("switch ") and len(nodes) <= largest:
        text += "; cluster.sbatch.switches=1 asks for nodes on one switch"
    return text


TABLE_HEADER = ("rank", "node", "local", *AXES)


def table_rows(layout: ParallelLayout, world: World) -> list[tuple[str, ...]]:
    """Returns one row per rank: rank, node, local rank, then its place on each axis of `AXES`."""
    rows: list[tuple[str, ...]] = []
    for node, count in enumerate(world.ranks_per_node):
        for local_rank in range(count):
            rank = len(rows)
            rows.append((str(rank), str(node), str(local_rank), *map(str, layout.coordinates(rank))))
    return rows


def layout_rows(
    layout: ParallelLayout, world: World, batch: BatchPlan, *, stages_per_rank: int, schedule: str = "1f1b"
) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table about groups and idle time; none if every rank is a whole replica."""
    if layout.is_replicated:
        return []
    rows = [("layout", f"{layout}; {layout.data_parallel_size} read different samples")]
    for axis in reversed(AXES):
        if getattr(layout, axis) <= 1:
            continue
        members = layout.members((axis,), 0)
        ranks = f"{members[0]}, {members[1]}, .. {members[-1]}"
        if len(members) == 2:
            ranks = f"{members[0]}, {members[1]}"
        elif members[1] - members[0] == 1:
            ranks = f"{members[0]}-{members[-1]}"
        span = "over several nodes" if spans_nodes(layout, world, axis) else "on one node each"
        count = layout.world_size // len(members)
        rows.append(("", f"{axis}: {count} groups of {len(members)}, {span}; the first: ranks {ranks}"))
    if layout.pp > 1:
        idle = pipeline_bubble(layout, batch, stages_per_rank=stages_per_rank, schedule=schedule)
        stages = layout.pp * stages_per_rank
        rows.append(("bubble", f"{idle:.0%} of a step: {stages} stages, {batch.accumulation} micro-batches"))
    return rows
