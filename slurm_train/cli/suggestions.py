"""`plan --suggest GB`: the layouts that a model could be trained in on the cluster that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slurm_train.cli.display import note, table
from slurm_train.cli.layout_rows import size
from slurm_train.errors import ConfigError
from slurm_train.launch.layout_speed import Machine
from slurm_train.launch.layout_suggest import Suggestion, suggest_layouts
from slurm_train.launch.world import plan_world

if TYPE_CHECKING:
    from slurm_train.config.schema import RunConfig

_HEADER = ("WHAT", "NODES", "MEMORY", "SPEED", "WORDS")


def read_memory(text: str) -> int:
    """Returns the bytes of so many GiB, e.g. "80".

    Raises:
        ConfigError: it is no positive number.
    """
    try:
        memory_gb = float(text)
    except ValueError:
        memory_gb = 0.0
    if not 0 < memory_gb < 1e6:
        raise ConfigError(
            f"--suggest {text} is no amount of memory", hint="give the memory of one device in GiB: plan --suggest 80"
        )
    return int(memory_gb * 2**30)


def print_suggestions(config: RunConfig, *, memory: str, env: Mapping[str, str]) -> int:
    """Prints the best layouts that fit to stdout, and what they were judged by to stderr; returns the exit code.

    Args:
        config: the run's; its degrees are not looked at.
        memory: GiB of one device, as typed.
        env: environment, for counting local GPUs.

    Raises:
        ConfigError: nothing fits.
    """
    world = plan_world(config, env)
    found = suggest_layouts(config, world, memory_bytes=read_memory(memory))
    if not found.best:
        raise ConfigError(
            f"none of {found.num_legal} legal layouts of {world.size} ranks fits into {memory} GiB a device",
            hint="use more nodes, a smaller batch.local_size, or parallel.cpu_offload=true",
        )
    note(f"  {found.num_legal:,} legal layouts of {world.size:,} ranks; speed by a simple model: {Machine()}")
    fastest = max(found.best, key=lambda one: one.tokens_per_s)
    names = {id(fastest): "fastest", id(found.best[0]): "best"}
    rows = [_row(names.get(id(one), ""), one, fastest) for one in found.best]
    if found.smallest is not None and found.smallest.world != world:
        rows.append(_row("smallest", found.smallest, fastest))
    print(table(_HEADER, rows))
    return 0


def _row(what: str, one: Suggestion, fastest: Suggestion) -> tuple[str, ...]:
    nodes, speed = f"{one.world.num_nodes}x{one.world.ranks_per_node[0]}", one.tokens_per_s / fastest.tokens_per_s
    shown = f"{speed:.0%}" if speed >= 0.01 else "below 1%"
    return (what, nodes, size(one.memory_bytes), shown, one.words)
