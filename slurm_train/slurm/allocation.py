"""Which nodes and tasks a job has, and which task this process is, read from the environment that Slurm sets.

Both are values made by `from_env(env)`. The step's variables win over the job's, because a step may run on fewer nodes
than the job has. Nothing is guessed: a missing variable is an error that names it. In a heterogeneous job Slurm sorts
the step's node list by name while it numbers nodes and ranks by component (22.05), so there the lists of the components
are put together instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from slurm_train.errors import ClusterError
from slurm_train.frozen_class import frozen
from slurm_train.slurm.nodelist import NodeListError, parse_nodelist, parse_tasks_per_node

_Item = TypeVar("_Item", int, str)
_IN_A_JOB = "run this inside a Slurm job: sbatch run_dir/submit.sh, or salloc first"
_UNDER_SRUN = "start the process with srun inside the job; a batch script or a login shell has no rank"


@frozen
class Allocation:
    """The nodes and task counts of this step, or of the job where there is no step."""

    requeue_id: str
    """The id to requeue or cancel exactly this job by: "A_T" in an array, else the job id.

    One element of an array carries the array's own id: requeueing by SLURM_JOB_ID would re-run the whole array.
    """
    restart_count: int
    """How often Slurm has restarted this job, for any cause; Slurm leaves it unset on the first run."""
    nodes: tuple[str, ...]
    """Host names in rank order; the first is where rank 0 lives."""
    tasks_per_node: tuple[int, ...]
    """Tasks on each of `nodes`; not always equal."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Allocation:
        """Returns the allocation that the variables of a batch script or a step describe.

        Raises:
            ClusterError: not in a job, or a variable is missing, malformed or disagrees with another.
        """
        nodes, tasks_per_node = _layout(env)
        job_id = str(_int(env, "SLURM_JOB_ID"))
        if env.get("SLURM_ARRAY_JOB_ID"):
            job_id = f"{_int(env, 'SLURM_ARRAY_JOB_ID')}_{_int(env, 'SLURM_ARRAY_TASK_ID')}"
        return cls(
            requeue_id=job_id,
            restart_count=_int(env, "SLURM_RESTART_COUNT") if env.get("SLURM_RESTART_COUNT") else 0,
            nodes=nodes,
            tasks_per_node=tasks_per_node,
        )

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.tasks_per_node):
            raise ClusterError(
                f"Slurm lists {len(self.nodes)} nodes ({','.join(self.nodes)}) but task counts for "
                f"{len(self.tasks_per_node)} ({','.join(map(str, self.tasks_per_node))})",
                hint="unset SLURM_* variables left over from another job, or start the step with srun",
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def num_tasks(self) -> int:
        """Number of tasks over all nodes."""
        return sum(self.tasks_per_node)


@frozen
class TaskPlace:
    """Which task of its step this process is."""

    rank: int
    """0 .. world_size - 1."""
    local_rank: int
    """0 .. local_world_size - 1, counted on this node."""
    node_rank: int
    """Index of this node in the step's node list."""
    world_size: int
    """Tasks of the step."""
    local_world_size: int
    """Tasks of the step on this node."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> TaskPlace:
        """Returns the place of a task that srun started.

        Raises:
            ClusterError: not started by srun, or a variable is missing, malformed or disagrees with another.
        """
        # A batch script has SLURM_PROCID=0 too, but only a task has a step.
        _int(env, "SLURM_STEP_ID", hint=_UNDER_SRUN)
        node_rank = _int(env, "SLURM_NODEID", hint=_UNDER_SRUN)
        world_size = _int(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", hint=_UNDER_SRUN)
        _, tasks_per_node = _layout(env)
        if node_rank >= len(tasks_per_node):
            raise _disagrees("SLURM_NODEID", node_rank, f"{len(tasks_per_node)} nodes")
        if world_size != sum(tasks_per_node):
            raise _disagrees("SLURM_STEP_NUM_TASKS", world_size, f"task counts {tasks_per_node}")
        return cls(
            rank=_int(env, "SLURM_PROCID", hint=_UNDER_SRUN),
            local_rank=_int(env, "SLURM_LOCALID", hint=_UNDER_SRUN),
            node_rank=node_rank,
            world_size=world_size,
            local_world_size=tasks_per_node[node_rank],
        )

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise _disagrees("SLURM_PROCID", self.rank, f"{self.world_size} tasks")
        if self.local_rank >= self.local_world_size:
            raise _disagrees("SLURM_LOCALID", self.local_rank, f"{self.local_world_size} tasks on this node")


def het_job_ids(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the job id of each component of a heterogeneous job, the leader's first; () in any other job.

    Raises:
        ClusterError: a variable is missing or malformed.
    """
    return tuple(str(_int(env, f"SLURM_JOB_ID_HET_GROUP_{index}")) for index in _components(env))


def _components(env: Mapping[str, str]) -> range:
    return range(_int(env, "SLURM_HET_SIZE") if env.get("SLURM_HET_SIZE") else 0)


def _layout(env: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the nodes in rank order and the number of tasks on each."""
    if not _components(env):
        nodes = _listed(env, parse_nodelist, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        return nodes, _listed(env, parse_tasks_per_node, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    step = _listed(env, parse_nodelist, "SLURM_STEP_NODELIST") if env.get("SLURM_STEP_NODELIST") else None
    nodes = ()
    tasks: tuple[int, ...] = ()
    for index in _components(env):
        component = _listed(env, parse_nodelist, f"SLURM_JOB_NODELIST_HET_GROUP_{index}")
        # srun --het-group may leave components out; no two of them share a node.
        if step is None or set(component) <= set(step):
            nodes += component
            tasks += _listed(env, parse_tasks_per_node, f"SLURM_TASKS_PER_NODE_HET_GROUP_{index}")
    if step is not None and set(nodes) != set(step):
        raise _disagrees("SLURM_STEP_NODELIST", ",".join(step), f"job components on {','.join(nodes) or 'other nodes'}")
    return nodes, tasks


def _first_set(env: Mapping[str, str], names: Sequence[str], hint: str) -> tuple[str, str]:
    """Returns name and value of the first variable that is set."""
    for name in names:
        if value := env.get(name, ""):
            return name, value
    raise ClusterError(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set", hint=hint)


def _int(env: Mapping[str, str], *names: str, hint: str = _IN_A_JOB) -> int:
    name, value = _first_set(env, names, hint)
    if not (value.isascii() and value.isdigit()):
        raise ClusterError(f"{name}={value!r} is not a number", hint=hint)
    return int(value)


def _listed(env: Mapping[str, str], parse: Callable[[str], list[_Item]], *names: str) -> tuple[_Item, ...]:
    name, value = _first_set(env, names, _IN_A_JOB)
    try:
        return tuple(parse(value))
    except NodeListError as err:
        raise ClusterError(f"{name}: {err.message}", hint=err.hint) from err


def _disagrees(name: str, value: int | str, found: str) -> ClusterError:
    return ClusterError(
        f"{name}={value} does not fit the step's {found}",
        hint="unset SLURM_* variables left over from another job, and start the process with srun",
    )
