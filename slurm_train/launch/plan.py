"""The plan of a run: everything that is decided before anything happens, as one value.

`plan` prints it, `plan.json` keeps it, the script is rendered from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurm_train.config.batch import (
    BatchPlan,
    check_batch,
    nearest_multiples,
    planned_lr,
    planned_sizes,
    recut_batch,
    solve_batch,
)
from slurm_train.config.frozen import config_hash
from slurm_train.config.layout import ParallelLayout
from slurm_train.config.schema import BatchSection, RunConfig, to_mapping
from slurm_train.errors import BatchError, ConfigError
from slurm_train.launch.layout import check_pipeline, plan_layout
from slurm_train.launch.world import World, plan_world
from slurm_train.rundir.layout import RunDirectory, require_room
from slurm_train.rundir.lookup import run_of_hash

if TYPE_CHECKING:
    from slurm_train.config.compose import Composed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as it would be carried out."""

    config: RunConfig
    world: World
    layout: ParallelLayout
    batch: BatchPlan
    lr: float
    """Peak learning rate after retuning."""
    config_hash: str
    """Hash of what is trained; the run id is its beginning."""
    run: RunDirectory
    directory: str
    """Submitting directory; relative paths in a user's code start there."""

    @property
    def _fewest(self) -> dict[str, int]:
        return {} if self.world.min_nodes is None else {"min_nodes": self.world.min_nodes}

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan.json` holds."""
        sizes = planned_sizes(self.config, self.batch, ranks_per_node=self.world.ranks_per_node)
        return {
            "config_hash": self.config_hash,
            "directory": self.directory,
            "world": {"size": self.world.size, "ranks_per_node": list(self.world.ranks_per_node), **self._fewest},
            "layout": self.layout.as_mapping,
            "batch": {
                "ranks": self.batch.ranks,
                "global_size": self.batch.global_size,
                "local_size": self.batch.local_size,
                "accumulation": self.batch.accumulation,
                **({} if sizes is None else {"sizes": list(sizes)}),
            },
            "lr": {
                "planned": self.lr,
                "configured": self.config.optim.lr,
                "retune": self.config.optim.lr_retune,
                "tuned_for_global_size": self.config.optim.lr_global_size or self.batch.global_size,
            },
            "max_steps": self.config.train.max_steps if self.config.trains else None,
            "samples": self.batch.global_size * self.config.train.max_steps if self.config.trains else None,
            "requeue": {"enabled": self.config.requeue.enabled, "strategy": "scontrol requeue incomplete"},
        }


def plan_run(composed: Composed, *, cwd: Path, env: Mapping[str, str]) -> RunPlan:
    """Returns the plan for a composed configuration; touches nothing.

    Args:
        composed: configuration and chosen groups.
        cwd: directory that a relative `run.root` starts from.
        env: environment, for counting local GPUs.

    Raises:
        ConfigError: an impossible batch, world or name; a script that is not there.
        RunError: the run's path would be too long.
    """
    config = composed.config
    _check_text(config)
    check_degrees(config)
    _check_script(config, cwd)
    world = plan_world(config, env)
    layout = plan_layout(config, world)
    # A user's own function or script has a batch of its own; ours would be a made-up number.
    asked = config.batch if config.trains else BatchSection()
    batch = _solve(config, asked, layout, world)
    name = default_name(composed) if config.run.name is None else config.run.name
    check_path_part("run.name", name)
    check_path("run.root", config.run.root)
    root = (cwd / Path(config.run.root).expanduser()).resolve()
    check_path("run.root", str(root))
    run = run_of_hash(root / name, config_hash(config, global_size=batch.global_size))
    require_room(run)
    return _assemble(config, world, layout, batch, run=run, directory=str(cwd))


def _solve(config: RunConfig, asked: BatchSection, layout: ParallelLayout, world: World) -> BatchPlan:
    """Returns the cut of the batch for the largest world; every smaller one that Slurm may grant has one as well."""
    ranks, stages = layout.data_parallel_size, layout.pp
    if world.min_nodes is None or not config.trains:
        return solve_batch(asked, ranks=ranks, stages=stages)
    possible = {one: plan_layout(config, one).data_parallel_size for one in world.possible()}
    if asked.global_size is asked.local_size is asked.accumulation is None:
        unit = math.lcm(*possible.values())
        asked = replace(asked, global_size=max(1, round(asked.default_global_size / unit)) * unit)
    batch = solve_batch(asked, ranks=ranks, stages=stages)
    require_cut_for_all(batch, possible, stages=stages)
    return batch


def require_cut_for_all(batch: BatchPlan, possible: Mapping[World, int], *, stages: int) -> None:
    """Does nothing where every world that Slurm may grant can share the global batch.

    Args:
        batch: the cut for the largest.
        possible: data-parallel ranks of each.
        stages: stages of the pipeline.

    Raises:
        BatchError: one cannot.
    """
    for world, ranks in possible.items():
        try:
            recut_batch(batch.global_size, ranks=ranks, local_size=batch.local_size, stages=stages)
        except BatchError as err:
            unit = math.lcm(*possible.values()) * stages
            sizes = [size for size in nearest_multiples(batch.global_size, unit) if size]
            raise BatchError(
                f"Slurm may grant {world.nodes_in_words}: {err.message}",
                hint=f"set batch.global_size={' or '.join(map(str, sizes))}, or another range of cluster.nodes",
            ) from err


def replan_run(
    config: RunConfig, before: Mapping[str, Any], *, run: RunDirectory, typed: Collection[str], env: Mapping[str, str]
) -> RunPlan:
    """Returns the plan for a run that exists and goes on with another configuration; touches nothing.

    The global batch stays what it was unless it was typed; on another number of ranks it is cut anew. A learning rate
    that follows the global batch was tuned for the old one.

    Args:
        config: what the run shall have from now on.
        before: its `plan.json`.
        run: where it lies.
        typed: the keys that were typed.
        env: environment, for counting local GPUs.

    Raises:
        ConfigError: an impossible batch or world.
    """
    check_degrees(config)
    world = plan_world(config, env)
    layout = plan_layout(config, world)
    batch = solve_batch(BatchSection(), ranks=layout.data_parallel_size, stages=layout.pp)
    if config.trains:
        batch = _solve_again(config.batch, before["batch"], layout=layout, typed=typed)
        if world.min_nodes is not None:
            possible = {one: plan_layout(config, one).data_parallel_size for one in world.possible()}
            require_cut_for_all(batch, possible, stages=layout.pp)
        if batch.global_size != before["batch"]["global_size"] and _follows_batch(config):
            tuned_for = int(before.get("lr", {}).get("tuned_for_global_size", before["batch"]["global_size"]))
            config = replace(config, optim=replace(config.optim, lr_global_size=tuned_for))
    return _assemble(config, world, layout, batch, run=run, directory=str(before.get("directory", "")))


def _follows_batch(config: RunConfig) -> bool:
    return config.optim.lr_retune != "none" and config.optim.lr_global_size is None


def _solve_again(
    asked: BatchSection, before: Mapping[str, Any], *, layout: ParallelLayout, typed: Collection[str]
) -> BatchPlan:
    ranks = layout.data_parallel_size
    global_size = asked.global_size if "batch.global_size" in typed else None
    local_size = asked.local_size if "batch.local_size" in typed else None
    accumulation = asked.accumulation if "batch.accumulation" in typed else None
    if global_size is None:
        global_size = int(before["global_size"])
    if local_size is accumulation is None and global_size > 0:
        return recut_batch(global_size, ranks=ranks, local_size=int(before["local_size"]), stages=layout.pp)
    given = replace(asked, global_size=global_size, local_size=local_size, accumulation=accumulation)
    return solve_batch(given, ranks=ranks, stages=layout.pp)


def _assemble(
    config: RunConfig, world: World, layout: ParallelLayout, batch: BatchPlan, *, run: RunDirectory, directory: str
) -> RunPlan:
    check_pipeline(config, layout, batch)
    check_batch(config, batch, layout=layout, ranks_per_node=world.ranks_per_node)
    return RunPlan(
        config=config,
        world=world,
        layout=layout,
        batch=batch,
        lr=planned_lr(config.optim, global_size=batch.global_size),
        config_hash=config_hash(config, global_size=batch.global_size),
        run=run,
        directory=directory,
    )


def default_name(composed: Composed) -> str:
    """Returns a run's name where none was given, e.g. "gpt-stdlib", "train" for script=[train.py]."""
    config = composed.config
    if config.script:
        return Path(config.script[0]).stem
    if config.task:
        return str(config.task.get("_target_", "task")).rpartition(".")[2]
    return "-".join(_part_name(composed, group) for group in ("model", "data"))


def _part_name(composed: Composed, group: str) -> str:
    choice = composed.choices.get(group)
    if choice != "custom":
        return str(choice)
    return str(composed.mapping[group]["_target_"]).rpartition(".")[2].lower()


def check_degrees(config: RunConfig) -> None:
    """Refuses what cannot be run: several ways of running at once, settings that exclude each other.

    Raises:
        ConfigError: as said.
    """
    if config.script is not None and config.task is not None:
        raise ConfigError("script and task are both set", hint="a run has one of the two: drop the other")
    if config.script == []:
        raise ConfigError("script=[] names no file", hint="write script=[train.py,--flag]")
    if any("\0" in word for word in config.script or ()):
        raise ConfigError(f"script={config.script!r} has a NUL, which no command line can hold", hint="remove it")
    if config.cluster is not None:
        _check_exports(config.cluster.export)
    elif config.container is not None and config.container.kind == "pyxis":
        raise ConfigError(
            "container.kind=pyxis is a plugin of srun, and the run would train on this machine",
            hint="use container=apptainer, or +cluster=<nodes>x<GPUs per node>",
        )
    _check_targets(config)
    _check_exchange(config)


def _check_text(config: RunConfig) -> None:
    # A lone surrogate, from a YAML file's "\\ud800" or a file name that is no UTF-8, could not be frozen.
    try:
        json.dumps(to_mapping(config), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as err:
        near = str(err.object)[max(err.start - 20, 0) : err.end + 20]
        raise ConfigError(f"a setting holds text that is not UTF-8: {near!r}", hint="write it in UTF-8") from err


def _check_exports(patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", pattern) is None:
            raise ConfigError(
                f"cluster.export has {pattern.partition('=')[0]!r}, which is no name or pattern of variables",
                hint="names alone, without values: cluster.export=[WANDB_API_KEY,MY_*]",
            )


def _check_script(config: RunConfig, cwd: Path) -> None:
    # Anything but a Python file may be a program that only the nodes have.
    name = config.script[0] if config.script else ""
    if name.endswith(".py") and not (cwd / name).is_file():
        raise ConfigError(f"script={name}: there is no such file in {cwd}", hint="give its path from where you are")


def _check_targets(config: RunConfig) -> None:
    needed = ("model", "data") if config.trains else ("task",) if config.task is not None else ()
    for name in needed:
        target = (getattr(config, name) or {}).get("_target_")
        if not isinstance(target, str) or not target:
            raise ConfigError(
                f"{name} has no _target_: there is nothing to build",
                hint=f"set {name}._target_=my_package.name" + ("" if name == "task" else f", or choose {name}=NAME"),
            )


def _check_exchange(config: RunConfig) -> None:
    ddp, health = config.ddp, config.health
    if ddp.comm != "post_local_sgd":
        return
    # The nodes' parameters differ between two averages, and a gradient may be infinite on one node only.
    every = health.check_replicas_every_steps
    if every is not None and every % ddp.average_every_steps:
        raise ConfigError(
            f"health.check_replicas_every_steps={every} would compare ranks that ddp.comm=post_local_sgd lets differ",
            hint=f"set it to a multiple of ddp.average_every_steps={ddp.average_every_steps}, or to null",
        )
    if health.on_non_finite == "rollback":
        raise ConfigError(
            "ddp.comm=post_local_sgd cannot roll back: a gradient that is not finite is seen by one node alone",
            hint="set health.on_non_finite to stop or skip",
        )


def check_path_part(key: str, value: str) -> None:
    """Refuses a name that is not one plain folder.

    Raises:
        ConfigError: it has a separator, a leading dot, or characters that a script or Slurm would read as more.
    """
    plain = value.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isalnum() or not value.isascii() or value.startswith((".", "-")):
        raise ConfigError(
            f"{key}={value!r} cannot be the name of a folder and of a job",
            hint="use ASCII letters, digits, '.', '_' and '-', not starting with '.' or '-'",
        )


def check_path(key: str, value: str) -> None:
    """Refuses a path that Slurm would expand or a script could not carry.

    Raises:
        ConfigError: it has a control character, or a percent sign or backslash (both are patterns in --output).
    """
    # "{attempt}" is filled in when an attempt starts, in the names of its logs.
    if not value.isprintable() or "%" in value or "\\" in value or "{attempt}" in value:
        raise ConfigError(f"{key}={value!r} has a character that Slurm reads as a pattern", hint="use a plain path")
