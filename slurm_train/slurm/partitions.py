"""The partitions of a cluster and what their nodes have, read from one `sinfo` call. Pure text in, values out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_train.errors import ClusterError

SINFO_FORMAT = "%R|%P|%a|%D|%s|%l|%L|%G|%c|%m|%t"

_TIME = re.compile(r"(?:(?P<days>[0-9]+)-)?(?P<fields>[0-9]+(?::[0-9]+){0,2})")


_USABLE = frozenset({"idle", "mix", "alloc", "comp", "resv", "plnd"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition that have the same parts and are in the same state."""

    num_nodes: int
    gpus_per_node: int
    gpu_type: str
    """Type as --gres wants it, e.g. "a100"; "" where the site names none."""
    cpus_per_node: int
    memory_per_node_mb: int
    state: str
    """Slurm's short word, e.g. "idle", "mix", "drain"; a trailing "*" says the node does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A partition that this user can see."""

    name: str
    is_default: bool
    state: str
    """ "up", "down", "drain" or "inact": only "up" starts jobs."""
    max_nodes: int | None
    """Nodes that one job may have; None if unlimited."""
    max_time_min: int | None
    """Longest time limit in minutes; None if unlimited."""
    default_time_min: int | None
    """Time limit of a job that asks for none; None if the longest."""
    groups: tuple[NodeGroup, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes of any kind and state."""
        return sum(group.num_nodes for group in self.groups)

    @property
    def num_usable_nodes(self) -> int:
        """Nodes that run jobs or could: neither down nor being drained."""
        return sum(group.num_nodes for group in self.groups if group.state.rstrip("-") in _USABLE)

    @property
    def gpus_per_node(self) -> int:
        """GPUs on the best-equipped nodes."""
        return max((group.gpus_per_node for group in self.groups), default=0)

    @property
    def cpus_per_node(self) -> int:
        """CPUs on the best-equipped nodes."""
        return max((group.cpus_per_node for group in self.groups), default=0)

    def num_nodes_with(self, *, gpus: int) -> int:
        """Returns how many nodes have at least so many GPUs, whatever their state."""
        return sum(group.num_nodes for group in self.groups if group.gpus_per_node >= gpus)


def parse_sinfo(text: str) -> list[Partition]:
    """Returns the partitions in the output of `sinfo -h -e -o SINFO_FORMAT`, in Slurm's order.

    Raises:
        ClusterError: a line is not of that format.
    """
    rows: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != SINFO_FORMAT.count("|") + 1:
            raise ClusterError(f"cannot read sinfo's line {line!r}", hint="run sinfo by hand and report what it prints")
        rows.setdefault(fields[0], []).append(fields)
    return [_partition(name, lines) for name, lines in rows.items()]


def parse_time_limit_min(text: str) -> int | None:
    """Returns a limit in whole minutes: "1-00:00:00" -> 1440, "30:00" -> 30; None for "infinite" and "n/a".

    Raises:
        ClusterError: the text is none of Slurm's forms.
    """
    if text.lower() in ("infinite", "unlimited", "n/a", "none", "partition_limit"):
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ClusterError(f"{text!r} is not a time limit", hint='Slurm writes e.g. "1-12:00:00", "30:00", "infinite"')
    numbers = [int(number) for number in match["fields"].split(":")]
    if match["days"] is not None:
        hours, minutes = (numbers + [0, 0])[:2]
        return int(match["days"]) * 1440 + hours * 60 + minutes
    # Without days one number is minutes, two are minutes:seconds, three are hours:minutes:seconds.
    return numbers[0] * 60 + numbers[1] if len(numbers) == 3 else numbers[0]


def parse_gpus(gres: str) -> tuple[int, str]:
    """Returns number and type of the GPUs in a node's generic resources: "gpu:a100:4(S:0-1),nic:2" -> (4, "a100").

    Of several types on one node the numbers add up and the type is "" (no single one would be right).
    """
    count, types = 0, set()
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = (word for word in entry.split(":") if word != "no_consume")
        if name != "gpu":
            continue
        # "gpu:4" is a number, "gpu:a100" a type, and of "gpu:3090:4" the last is the number, whatever the type is.
        number = words.pop() if words and words[-1].isdigit() else "1"
        count += int(number)
        types.add(words[0] if words else "")
    return count, types.pop() if len(types) == 1 else ""


def tres_gpus(tres: str) -> int | None:
    """Returns the GPUs in a job's trackable resources: "cpu=8,gres/gpu=4,gres/gpu:3090=4" -> 4; None if none are told.

    A site accounts for all of them, for each type, or for both; then the types are parts of the whole.
    """
    pairs = [entry.partition("=")[::2] for entry in tres.split(",")]
    counts = {name: int(count) for name, count in pairs if count.isdigit()}
    typed = [count for name, count in counts.items() if name.startswith("gres/gpu:")]
    return counts.get("gres/gpu", sum(typed) if typed else None)


def _partition(name: str, rows: list[list[str]]) -> Partition:
    _, starred, state, _, job_size, max_time, default_time, *_ = rows[0]
    most = job_size.rpartition("-")[2]
    return Partition(
        name=name,
        is_default=starred == f"{name}*",
        state=state,
        max_nodes=int(most) if most.isdigit() else None,
        max_time_min=parse_time_limit_min(max_time),
        default_time_min=parse_time_limit_min(default_time),
        groups=tuple(_group(row) for row in rows if row[3] != "0"),
    )


def _group(row: list[str]) -> NodeGroup:
    num_nodes, gres, cpus, memory, state = row[3], row[7], row[8], row[9], row[10]
    gpus_per_node, gpu_type = parse_gpus(gres)
    return NodeGroup(
        num_nodes=int(num_nodes),
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        # "64+" where nodes of one line differ: the smallest of them.
        cpus_per_node=int(cpus.rstrip("+")),
        memory_per_node_mb=int(memory.rstrip("+")),
        state=state,
    )
