"""Which nodes and tasks a job has, and which task this process is, read from the environment that Slurm sets.

Also Slurm's compact lists of hosts and tasks, written out. Allocation and task are values made by `from_env(env)`. The
step's variables win over the job's, because a step may run on fewer nodes than the job has. Nothing is guessed: a
missing variable is an error that names it. In a heterogeneous job Slurm sorts the step's node list by name while it
numbers nodes and ranks by component (22.05), so there the lists of the components are put together instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slurm_train.errors import ClusterError

_Item = TypeVar("_Item", int, str)
_IN_A_JOB = "run this inside a Slurm job: sbatch run_dir/submit.sh, or salloc first"
_UNDER_SRUN = "start the process with srun inside the job; a batch script or a login shell has no rank"


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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


def fewest_cpus(env: Mapping[str, str]) -> int | None:
    """Returns how many CPUs the job has on the node where it has the fewest; None where Slurm does not say it.

    The components of a heterogeneous job have numbers of their own, and there is none for all of them.

    Raises:
        ClusterError: the variable is malformed.
    """
    if _components(env) or not env.get("SLURM_JOB_CPUS_PER_NODE"):
        return None
    return min(_listed(env, parse_tasks_per_node, "SLURM_JOB_CPUS_PER_NODE"))


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
        value = env.get(name, "")
        if value:
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


def _disagrees(name: str, value: int | str, expected: str) -> ClusterError:
    return ClusterError(
        f"{name}={value} does not fit the step's {expected}",
        hint="unset SLURM_* variables left over from another job, and start the process with srun",
    )


# Slurm's own limit on one range, and our limit on a whole list (it has no cluster larger than this).
_MAX_HOSTS = 65536
# Slurm counts in 64 bits; longer numbers are clamped by it, silently.
_MAX_DIGITS = 18

# Separators, a member, or a character that has no place here.
_TOKEN = re.compile(r"[, \t\n]+|(?P<member>(?:[A-Za-z0-9._-]|\[[^\[\]]*\])+)|(?P<unexpected>.)", re.DOTALL)
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,15})")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class NodeListError(ClusterError):
    """A host list or task list that is not in Slurm's compact form."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(
            f"{text!r} is not a Slurm list: {problem}",
            hint='write hosts as in "n01", "rack[1-2]node[3-4]", "a[1],b[2-3]"; tasks per node as in "2(x3),1"',
        )


def cluster_of(env: Mapping[str, str]) -> str:
    """Returns the name of the cluster that a job is of, in small letters; "" where that is not known.

    Args:
        env: the job's environment.
    """
    return env.get("SLURM_CLUSTER_NAME", "").lower()


def parse_nodelist(text: str) -> list[str]:
    """Returns every host of a compact list, e.g. "a[1],b[08-10]" -> ["a1", "b08", "b09", "b10"].

    What `scontrol show hostnames` prints, in the same order, on machines that have no scontrol (containers, some
    compute nodes); an empty list gives []. Two things differ on purpose: text after the last bracket ("gpu[1-2].lan")
    is expanded where Slurm 22.05 refuses it, and text that scontrol turns into nonsense ("a[1,2" -> "a]") is refused.

    Raises:
        NodeListError: brackets do not match, a range runs backwards or is too large, or a character cannot be
            part of a host name; the message quotes the part.
    """
    hosts: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["unexpected"]:
            raise NodeListError(text, f"unexpected {token[0]!r} at character {token.start() + 1}")
        if not token["member"]:
            continue
        literals, groups = _split_groups(text, token[0])
        if len(hosts) + math.prod(map(len, groups)) > _MAX_HOSTS:
            raise NodeListError(text, f"more than {_MAX_HOSTS} hosts")
        # Slurm runs through the last group fastest, then through the *first*, the second, and so on:
        # a[1-2]b[3-4]c[5] is a1b3c5, a2b3c5, a1b4c5, a2b4c5.
        heads = [literals[0]]
        for literal, group in zip(literals[1:], groups[:-1], strict=False):
            heads = [head + number + literal for number in group for head in heads]
        hosts += [head + number + literals[-1] for head in heads for number in groups[-1]] if groups else heads
    return hosts


def _split_groups(text: str, member: str) -> tuple[list[str], list[list[str]]]:
    """Returns the literals of a member, one more than groups, and the numbers of each group as they are written."""
    pieces = re.split(r"\[([^\]]*)\]", member)
    groups = []
    for group in pieces[1::2]:
        numbers: list[str] = []
        for part in group.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise NodeListError(text, f"expected a number or a range, found {part!r}")
            low = match[1]
            high = match[2] or match[1]
            if max(len(low.lstrip("0")), len(high.lstrip("0"))) > _MAX_DIGITS:
                raise NodeListError(text, f"number too large in {part!r}")
            if not int(low) <= int(high) < int(low) + _MAX_HOSTS - len(numbers):
                raise NodeListError(text, f"range {part!r} runs backwards or has more than {_MAX_HOSTS} hosts")
            # The width is that of the lower end alone: [1-010] is 1..10, [08-12] is 08..12.
            numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        groups.append(numbers)
    return pieces[::2], groups


def compact_nodelist(hosts: Sequence[str]) -> str:
    """Returns hosts in the compact form, e.g. ["n8", "n9", "n10", "m1"] -> "n[8-10],m1"; for people to read.

    The order is kept, so `parse_nodelist` gives the same hosts back, except names that Slurm does not know of.
    """
    ranges: list[tuple[str, str, str]] = []  # prefix, first and last number
    for host in hosts:
        match = _NUMBERED.fullmatch(host)
        prefix, digits = (match[1], match[2]) if match else (host, "")
        before, first, last = ranges[-1] if ranges else ("", "", "")
        # Slurm takes the width from the range's first number, so 08 to 10 is one range and 9 to 010 is none.
        if digits and last and before == prefix and digits == str(int(last) + 1).zfill(len(last)):
            ranges[-1] = (prefix, first, digits)
        else:
            ranges.append((prefix, digits, digits))
    parts = (f"{prefix}{first}" if first == last else f"{prefix}[{first}-{last}]" for prefix, first, last in ranges)
    return ",".join(parts)


def parse_tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node of a step, e.g. "2(x3),1" -> [2, 2, 2, 1].

    Raises:
        NodeListError: the text is empty or not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise NodeListError(text, f"expected a count, found {part!r}")
        repeat = int(match[2] or 1)
        if not 1 <= repeat <= _MAX_HOSTS - len(counts):
            raise NodeListError(text, f"cannot repeat a count {repeat} times")
        counts += [int(match[1])] * repeat
    return counts
