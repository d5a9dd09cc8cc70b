"""The plan of a run or a sweep: all decisions before the first effect, as one value.

`plan` prints it, `plan.json` stores it, the batch script is rendered from it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.code.hub import HubFiles, pin_hub_files
from slurm_train.config.batch import (
    BatchPlan,
    check_batch,
    check_schedule,
    nearest_multiples,
    num_batches,
    planned_lr,
    planned_shares,
    recut_batch,
    solve_batch,
)
from slurm_train.config.frozen import config_hash, is_below
from slurm_train.config.parallel import ParallelLayout
from slurm_train.config.program import Program, program_of
from slurm_train.config.schema import BatchSection, RunConfig, check_groups, to_mapping
from slurm_train.config.synonyms import EXPORT_WORDS
from slurm_train.distributed.master import read_ports
from slurm_train.errors import BatchError, Check, ConfigError, RunError, require_all
from slurm_train.formatting import count
from slurm_train.plan.cpu_part import LEFT_TO_SLURM, CpuPart, NodeCpus
from slurm_train.plan.placement import World, check_pipeline, fitting_world, plan_layout, plan_world
from slurm_train.plan.script_words import PLACEHOLDER, check_script
from slurm_train.plan.shell_choices import take_shell_choices
from slurm_train.plan.shell_variables import refuse_unexpanded
from slurm_train.rundir.files import plain_path
from slurm_train.rundir.lookup import run_of_hash
from slurm_train.rundir.paths import ID_DIGITS, RunDirectory, require_room
from slurm_train.rundir.places import own_places
from slurm_train.rundir.plan_record import PlannedBatch, PlannedRate, PlannedWorld, PlanRecord
from slurm_train.rundir.sweep import Element, SweepDirectory, sweep_place
from slurm_train.slurm.commands import SlurmCommands

if TYPE_CHECKING:
    from slurm_train.config.compose import Composed, Point


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
    """Submitting directory, which relative paths in a user's code start from."""
    from_shell: tuple[str, ...] = ()
    """Remarks about the choices of the shell for all jobs: which were used, and which not."""
    unused_keys: tuple[str, ...] = ()
    """Typed keys that the script of the run does not get."""
    chosen: str = ""
    """What `parallel.dp_shard=auto` has chosen and why, or that the layout does not fit; "" where neither applies."""
    cpus: CpuPart = LEFT_TO_SLURM
    """What `cluster.cpus_per_gpu=auto` has chosen."""
    hub: tuple[HubFiles, ...] = ()
    """The files that must be in the cache of the Hub before the run is started."""

    @property
    def program(self) -> Program:
        """What the ranks execute."""
        return program_of(self.config)

    @property
    def max_steps(self) -> int | None:
        """Steps of the whole run; None if only the ranks know them."""
        return self.program.num_steps

    @property
    def num_devices(self) -> int:
        """GPUs that the job holds, including those of spare nodes; on CPUs the number of ranks."""
        return self.world.num_ranks + self.config.slurm.spare_nodes * self.world.ranks_per_node[0]

    @property
    def cpus_per_rank(self) -> int | None:
        """CPUs that the job requests for each rank; None: Slurm's default."""
        typed = self.config.slurm.cpus_per_gpu
        if typed == "auto":
            return self.cpus.number
        return None if typed is None else max(1, typed // self.config.sweep.runs_per_gpu)

    @property
    def num_samples(self) -> int | None:
        """Samples of all steps, None if they are not known yet."""
        steps = self.max_steps
        return None if steps is None else self.batch.global_size * num_batches(self.config.batch.growth, steps)

    @property
    def record(self) -> PlanRecord:
        """The content of `plan.json`."""
        shares = planned_shares(self.config, self.batch, ranks_per_node=self.world.ranks_per_node)
        batch = self.batch
        return PlanRecord(
            config_hash=self.config_hash,
            directory=self.directory,
            path=str(self.run.path),
            world=PlannedWorld(
                size=self.world.num_ranks, ranks_per_node=self.world.ranks_per_node, num_nodes=self.world.node_counts
            ),
            layout=self.layout.as_mapping,
            chosen=self.chosen,
            cpus_per_rank=self.cpus_per_rank,
            batch=PlannedBatch(
                ranks=batch.ranks,
                global_size=batch.global_size,
                local_size=batch.local_size,
                accumulation=batch.accumulation,
                shares=() if len(set(shares)) == 1 else tuple(shares),
            ),
            lr=PlannedRate(
                planned=self.lr,
                configured=self.config.optim.lr,
                retune=self.config.optim.lr_retune,
                tuned_for_global_size=self.config.optim.lr_global_size or batch.global_size,
            ),
            max_steps=self.max_steps,
            samples=self.num_samples,
            requeue={"enabled": self.config.requeue.enabled},
        )


Settle = Callable[[RunConfig, World, Mapping[str, str]], tuple[RunConfig, str]]
"""Replaces automatic settings of a configuration by numbers for a world size, with the reason: `settle_parallel`."""


def leave_open(config: RunConfig, _world: World, _env: Mapping[str, str]) -> tuple[RunConfig, str]:
    """Returns a configuration unchanged, for runs that are no training of their own."""
    return config, ""


def plan_run(
    composed: Composed,
    *,
    cwd: Path,
    env: Mapping[str, str],
    settle: Settle = leave_open,
    node_cpus: NodeCpus | None = None,
) -> RunPlan:
    """Returns the plan for a composed configuration; writes nothing. If it names the Hub, the Hub is asked.

    If `cluster.cpus_per_gpu` is "auto", Slurm is asked for the CPUs of its nodes.

    Args:
        composed: configuration and chosen groups.
        cwd: directory that a relative `run.root` starts from.
        env: environment, for counting local GPUs and for the choices of the shell.
        settle: chooses settings that are left open.
        node_cpus: Slurm's answers about nodes, if several runs are planned.

    Raises:
        ConfigError: an impossible batch, world or name; a script or a repository of the Hub that does not exist.
        RunError: the run's path would be too long.
    """
    config = composed.config
    from_shell = tuple[str, ...]()
    if composed.open_keys is not None:
        config, from_shell = take_shell_choices(config, composed.open_keys, env)
    _check_text(config)
    require_all(_conflicts(config))
    _check_meeting(config)
    check_groups(program_of(config).used)
    world = plan_world(config, env)
    check_script(config, cwd, num_ranks=world.num_ranks)
    config, chosen = settle(config, world, env)
    world = fitting_world(config, world)
    layout = plan_layout(config, world)
    batch = solve_batch(program_of(config).used.batch, ranks=layout.data_parallel_size, stages=layout.pp)
    # Questions over the network come after all checks that need none.
    hub = tuple[HubFiles, ...]()
    if composed.open_keys is not None:
        # A frozen run already has paths instead of repositories, also if these no longer exist.
        config, hub = pin_hub_files(config, cwd=cwd)
    name = default_name(composed) if config.run.name is None else config.run.name
    check_path_part("run.name", name)
    check_path("run.root", config.run.root)
    refuse_unexpanded(config, env)
    root = plain_path(cwd, config.run.root)
    check_path("run.root", str(root))
    if config.preflight.only:
        # A check trains nothing, and the same words must check again, so each has a folder that no verb lists.
        run = RunDirectory(own_places(root)[-1] / ".doctor" / secrets.token_hex(ID_DIGITS // 2))
    else:
        run = run_of_hash(root, name, config_hash(config, global_size=batch.global_size))
    require_room(run)
    plan = _assemble(config, world, layout, batch, run=run, directory=str(cwd))
    # os.path, since Path.exists raises where a folder above may not be entered.
    if not os.path.exists(run.path):  # noqa: PTH110
        _check_schedule(plan)
    cpus = _cpus_of(config, world, env, node_cpus)
    return replace(plan, from_shell=from_shell, unused_keys=composed.unused_keys, hub=hub, chosen=chosen, cpus=cpus)


def _cpus_of(config: RunConfig, world: World, env: Mapping[str, str], node_cpus: NodeCpus | None) -> CpuPart:
    """Returns the CPUs that `cluster.cpus_per_gpu=auto` stands for in a run."""
    if not config.uses_cluster or config.slurm.cpus_per_gpu != "auto":
        return LEFT_TO_SLURM
    node_cpus = ask_node_cpus(env) if node_cpus is None else node_cpus
    return node_cpus.part_of(
        config.slurm,
        world,
        is_interactive=config.launch == "interactive",
        runs_per_node=config.sweep.pack,
        runs_per_gpu=config.sweep.runs_per_gpu,
    )


def ask_node_cpus(env: Mapping[str, str], commands: SlurmCommands | None = None) -> NodeCpus:
    """Returns the source of Slurm's answers about nodes; Slurm is asked when an answer is needed."""
    return NodeCpus(commands or SlurmCommands(env), in_allocation="SLURM_JOB_ID" in env)


def replan_run(
    config: RunConfig,
    old: PlanRecord,
    *,
    run: RunDirectory,
    typed: Collection[str],
    env: Mapping[str, str],
    settle: Settle = leave_open,
) -> RunPlan:
    """Returns the plan for an existing run that continues with another configuration; writes nothing.

    The global batch stays the same unless it was typed; for another number of ranks it is divided again. A learning
    rate that depends on the global batch was tuned for the old one.

    Args:
        config: the configuration from now on.
        old: its plan up to now.
        run: the run.
        typed: the keys that were typed.
        env: environment, for counting local GPUs.
        settle: chooses settings that are left open.

    Raises:
        ConfigError: an impossible batch or world.
        RunError: `plan.json` cannot be read.
    """
    require_all(_conflicts(config))
    _check_meeting(config)
    world = plan_world(config, env)
    config, chosen = settle(config, world, env)
    world = fitting_world(config, world)
    layout = plan_layout(config, world)
    batch = solve_batch(BatchSection(), ranks=layout.data_parallel_size, stages=layout.pp)
    if program_of(config).is_planned:
        old_batch = old.batch
        if old_batch is None:
            raise RunError(f"{run.plan} cannot be read", hint="type the run's first command again")
        global_size = config.batch.global_size if "batch.global_size" in typed else None
        local_size = config.batch.local_size if "batch.local_size" in typed else None
        accumulation = config.batch.accumulation if "batch.accumulation" in typed else None
        if global_size is None:
            global_size = old_batch.global_size
        if local_size is None and accumulation is None and global_size > 0:
            batch = recut_batch(global_size, ranks=batch.ranks, local_size=old_batch.local_size, stages=layout.pp)
        else:
            section = replace(config.batch, global_size=global_size, local_size=local_size, accumulation=accumulation)
            batch = solve_batch(section, ranks=batch.ranks, stages=layout.pp)
        follows = config.optim.lr_retune != "none" and config.optim.lr_global_size is None
        if follows and batch.global_size != old_batch.global_size:
            tuned_for = old_batch.global_size if old.lr is None else old.lr.tuned_for_global_size
            config = replace(config, optim=replace(config.optim, lr_global_size=tuned_for))
    plan = _assemble(config, world, layout, batch, run=run, directory=old.directory)
    if any(is_below(key, section) for key in typed for section in ("optim", "train", "batch")):
        _check_schedule(plan)
    cpus = _cpus_of(config, world, env, None)
    return replace(plan, from_shell=take_shell_choices(config, None, env)[1], chosen=chosen, cpus=cpus)


def _assemble(
    config: RunConfig, world: World, layout: ParallelLayout, batch: BatchPlan, *, run: RunDirectory, directory: str
) -> RunPlan:
    check_pipeline(config, layout, batch)
    if program_of(config).is_planned:
        _require_cut_for_all(config, world, batch, stages=layout.pp)
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


def _check_schedule(plan: RunPlan) -> None:
    """Checks that a run is long enough for its schedule; with epochs the ranks do, when they have counted the samples.

    Not of a run that has begun and stays as it is: one of an earlier version goes on.

    Raises:
        ConfigError: as `check_schedule`.
    """
    config = plan.config
    if config.train.evaluate_from is None and plan.num_samples is not None:
        check_schedule(config.optim, total_samples=plan.num_samples, global_size=plan.batch.global_size)


def _require_cut_for_all(config: RunConfig, world: World, batch: BatchPlan, *, stages: int) -> None:
    """Refuses a global batch that cannot be divided among the ranks of every world that Slurm may grant."""
    if not world.node_counts:
        return
    possible = {size: plan_layout(config, size).data_parallel_size for size in world.possible()}
    for smaller, ranks in possible.items():
        try:
            recut_batch(batch.global_size, ranks=ranks, local_size=batch.local_size, stages=stages)
        except BatchError as err:
            unit = math.lcm(*possible.values()) * stages
            sizes = [size for size in nearest_multiples(batch.global_size, unit) if size]
            raise BatchError(
                f"Slurm may grant {smaller.nodes_in_words}: {err.message}",
                hint=f"set batch.global_size={' or '.join(map(str, sizes))}, or another range of cluster.nodes",
            ) from err


def default_name(composed: Composed) -> str:
    """Returns a run's name if none was given, e.g. "gpt-stdlib", "train" for script=[train.py]."""
    # The name is derived and not typed, so characters that it cannot have are replaced instead of refused.
    return re.sub(r"[^A-Za-z0-9._-]+", "_", _name_of_program(composed)).lstrip(".-_") or "run"


def _name_of_program(composed: Composed) -> str:
    config = composed.config
    name = program_of(config).short_name
    if name:
        return name
    names = {group: str(composed.choices.get(group)) for group in ("model", "data")}
    for group in [group for group, choice in names.items() if choice == "custom"]:
        names[group] = str(composed.mapping[group]["_target_"]).rpartition(".")[2].lower()
    return "-".join(names.values())


def _check_meeting(config: RunConfig) -> None:
    """Checks where the ranks are to meet.

    Raises:
        ConfigError: no interface or name of a node, or no range of ports.
    """
    cluster = config.slurm
    if cluster.rendezvous_ports is not None:
        read_ports(cluster.rendezvous_ports)
    name = cluster.rendezvous_address
    if name is not None and re.fullmatch(r"[\w.-]+|[\w.-]*%N[\w.-]*", name) is None:
        raise ConfigError(
            f"cluster.rendezvous_address={name} is neither an interface nor a name with %N, Slurm's name of a node",
            hint="write an interface of the nodes (ib0), or a name: %Ni, %N-ib.cluster",
        )


def _own_resume_checks(config: RunConfig) -> Iterator[Check]:
    """Yields checks of the words by which a script resumes by itself."""
    words = config.own_resume.words
    checkpoints = config.own_resume.checkpoints
    yield (
        (bool(words) or checkpoints is not None) and config.script is None,
        "own_resume is for a script, and this run has none",
        "drop it; the trainer, and a script with `session.training`, resume by themselves",
    )
    yield (
        bool(words) != bool(checkpoints),
        f"own_resume.words={words} and own_resume.checkpoints={checkpoints!r}: one is of no use without the other",
        "say by own_resume.checkpoints where the script saves: from the second start on it gets own_resume.words where "
        "a file is there, e.g. own_resume.words=[--resume,latest] 'own_resume.checkpoints=$SLURM_TRAIN_RUN_DIR/*.pt'",
    )
    in_braces = [name for word in words for name in re.findall(r"\{\w*\}", word)]
    strange = [name for name in in_braces if PLACEHOLDER.fullmatch(name) is None]
    yield (
        bool(strange),
        f"own_resume.words has {''.join(strange[:1])}",
        "write {checkpoint}, {folder} or {step}",
    )


def _conflicts(config: RunConfig) -> Iterator[Check]:
    """Yields checks for settings that cannot be combined, e.g. several kinds of programs in one run.

    Long because it is a table of independent refusals.
    """
    script = config.script
    program = program_of(config)
    ddp = config.ddp
    yield (
        script is not None and config.task is not None,
        "script and task are both set",
        "a run has one: drop the other",
    )
    yield script == [], "script=[] names no file", "write script=[train.py,--flag]"
    has_nul = any("\0" in word for word in script or ())
    yield has_nul, f"script={script!r} has a NUL, which no command line can hold", "remove it"
    yield from _own_resume_checks(config)
    cluster = config.slurm
    yield (
        cluster.gpu_flag != "none" and cluster.env.get("CUDA_VISIBLE_DEVICES") is not None,
        "cluster.env.CUDA_VISIBLE_DEVICES would do nothing: Slurm sets it for each step of a job with GPUs",
        "ask for as many GPUs as are meant: cluster.gpus_per_node=N; where Slurm knows no GPUs, cluster.gpu_flag=none",
    )
    for pattern in cluster.export:
        name, equals, _ = pattern.partition("=")
        yield (
            re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", pattern) is None,
            f"cluster.export has {name!r}, which is no name or pattern of variables",
            "names alone, without values: cluster.export=[WANDB_API_KEY,MY_*]"
            + (f"; a value is set by cluster.env.{name}=VALUE" if equals else ""),
        )
        yield (
            pattern in EXPORT_WORDS,
            f"cluster.export has {pattern}, a word of sbatch's --export and no variable",
            EXPORT_WORDS.get(pattern, ""),
        )
    uneven = not isinstance(cluster.gpus_per_node, int)
    yield (
        config.requeue.warm_ranks and (not program.used.requeue.warm_ranks or uneven or cluster.launcher == "torchrun"),
        "requeue.warm_ranks=true needs the trainer, equal nodes and srun: your own code is not started again after a "
        "failure, a heterogeneous job's steps cannot overlap, and torchrun starts its ranks again by itself",
        "leave requeue.warm_ranks out",
    )
    yield (
        not config.uses_cluster and config.container is not None and config.container.kind == "pyxis",
        "container.kind=pyxis is a plugin of srun, and the run would train on this machine",
        "use container=apptainer, or +cluster=<nodes>x<GPUs per node>",
    )
    per_node = cluster.memory_gb_per_node
    per_gpu = cluster.memory_gb_per_gpu
    yield (
        per_node is not None and per_gpu is not None,
        f"cluster.memory_gb_per_node={per_node} and cluster.memory_gb_per_gpu={per_gpu} both give the memory",
        "leave one out, or set it to null",
    )
    for name, section in program.built.items():
        target = (section or {}).get("_target_")
        yield (
            not isinstance(target, str) or not target,
            f"{name} has no _target_: there is nothing to build",
            f"set {name}._target_=my_package.name, or choose a shipped one",
        )
    yield (
        (config.data or {}).get("document_mask") is True and config.parallel.cp not in (1, -1),
        f"data.document_mask=true was asked with parallel.cp={config.parallel.cp}, which cuts sequences into parts "
        "whose attention has no document mask",
        "set data.document_mask=false, or leave parallel.cp at 1",
    )
    yield (
        ddp.find_unused_parameters and ddp.static_graph,
        "ddp.find_unused_parameters=true looks for other parameters in every step, and ddp.static_graph=true promises "
        "that they are the same",
        "set one of them: a static graph may leave parameters out",
    )
    older = _without_float8(cluster.gpu_type or "")
    yield (
        program.used.train.precision == "fp8" and (cluster.gpu_flag == "none" or older is not None),
        f"train.precision=fp8 needs GPUs with float8 products; requested: {older or 'none'}",
        "float8 needs Ada, Hopper or later GPUs; train.precision=auto suits every GPU",
    )
    if config.train.param_dtype == "bfloat16":
        because = "train.param_dtype=bfloat16 has parameters and gradients of two bytes each"
        for is_set, setting, instead in (
            (
                config.train.precision not in ("auto", "bfloat16", "fp8"),
                f"train.precision={config.train.precision}",
                "auto",
            ),
            (config.parallel.gather_dtype == "float32", "parallel.gather_dtype=float32", "auto"),
            (ddp.comm != "none", f"ddp.comm={ddp.comm}", "none"),
        ):
            yield is_set, f"{setting} was asked, but {because}", f"set {setting.partition('=')[0]}={instead}"


def _without_float8(gpu_type: str) -> str | None:
    """Returns a site's name of GPUs if they are older than Ada, e.g. "a100-80gb"; None for all other names."""
    words = re.findall(r"[a-z0-9]+", gpu_type.lower())
    return gpu_type if any(_OLDER_THAN_ADA.fullmatch(word) for word in words) else None


# Data centre and workstation cards, then GeForce: "3090", "rtx2080ti".
_OLDER_THAN_ADA = re.compile(
    r"[km]\d0|p40?|p100|v100s?|t4|a2|a10g?|a16|a30|a40|a100|a800|a[456]000|(?:rtx|gtx)?(?:10|16|20|30)[5-9]0(?:ti)?"
)


def _check_text(config: RunConfig) -> None:
    # A lone surrogate, from a YAML file's "\\ud800" or a file name that is no UTF-8, could not be frozen.
    try:
        json.dumps(to_mapping(config), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as err:
        near = str(err.object)[max(err.start - 20, 0) : err.end + 20]
        raise ConfigError(f"a setting holds text that is not UTF-8: {near!r}", hint="write it in UTF-8") from err


def check_path_part(key: str, value: str) -> None:
    """Refuses a name that is not one plain folder.

    Raises:
        ConfigError: it has a separator, a leading dot, or characters with a special meaning for the shell or Slurm.
    """
    plain = value.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isalnum() or not value.isascii() or value.startswith((".", "-")):
        hint = "use ASCII letters, digits, '.', '_' and '-', not starting with '.' or '-'"
        if key == "run.name":
            hint += "; what a site prescribes of a job's name goes in front of it: cluster.job_name_prefix=project:"
        raise ConfigError(f"{key}={value!r} cannot be the name of a folder and of a job", hint=hint)


def check_path(key: str, value: str) -> None:
    """Refuses a path that Slurm would expand or a script could not carry.

    Raises:
        ConfigError: it has a control character, or a percent sign or backslash (both are patterns in --output), or
            bytes that are no text under this locale.
    """
    try:
        value.encode()
    except UnicodeEncodeError as err:
        raise ConfigError(
            f"{key}={value!r} has bytes that are no text under the locale of this shell, so the jobs could not find it",
            hint="export LC_ALL=C.UTF-8",
        ) from err
    # "{attempt}" is filled in when an attempt starts, in the names of its logs.
    if not value.isprintable() or "%" in value or "\\" in value or "{attempt}" in value:
        raise ConfigError(f"{key}={value!r} has a character that Slurm reads as a pattern", hint="use a plain path")


# --- a sweep: each run is planned as if it were typed alone ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """A sweep as it would be carried out."""

    sweep: SweepDirectory
    elements: tuple[Element, ...]
    plans: tuple[RunPlan, ...]
    """The plan of each element."""

    @property
    def max_parallel(self) -> int | None:
        """Runs that may run at once."""
        return self.plans[0].config.sweep.max_parallel

    @property
    def pack(self) -> int:
        """Runs that share a job."""
        return self.plans[0].config.sweep.pack

    @property
    def uses_cluster(self) -> bool:
        """Whether the runs are submitted to Slurm."""
        return self.plans[0].config.uses_cluster

    @property
    def keys(self) -> list[str]:
        """The keys that the sweep sets, in the order of the words."""
        return list(self.elements[0].overrides)


def _refuse_unused_values(points: Sequence[Point], plans: Sequence[RunPlan]) -> None:
    """Refuses a sweep over a key that the script of the runs does not get: all of them would do the same.

    Raises:
        ConfigError: it is one.
    """
    unused = [key for key in points[0].values if key in plans[0].unused_keys]
    if unused:
        raise ConfigError(
            f"{unused[0]} is swept, and the script of the runs does not get it: all of them would do the same",
            hint=unused_hint(plans[0], unused[0]),
        )


def unused_hint(plan: RunPlan, key: str) -> str:
    """Returns how the script of a run gets the value of a key, e.g. "optim.lr"; a section is for the trainer alone."""
    if "." not in key:
        return "drop it"
    words = ",".join(plan.config.script or [])
    return f"""hand it over as a word, in single quotes: 'script=[{words},--{key.rpartition(".")[2]},${{{key}}}]'"""


def plan_sweep(
    points: Sequence[Point],
    composed: Iterator[Composed],
    *,
    cwd: Path,
    env: Mapping[str, str],
    sweep_id: str | None = None,
    settle: Settle = leave_open,
) -> SweepPlan:
    """Returns the plan of a sweep; writes nothing.

    Args:
        points: the values of each run.
        composed: the configuration of each point; each is composed when it is needed.
        cwd: directory that a relative `run.root` starts from.
        env: environment, for counting local GPUs.
        sweep_id: the sweep to which these points are added; None: a new one.
        settle: chooses settings that are left open in each run.

    Raises:
        ConfigError: a point that is no possible run (with its number and values), two points that are the same run,
            or runs that cannot be in one sweep.
    """
    plans = list[RunPlan]()
    node_cpus = ask_node_cpus(env)
    for index, point in enumerate(points):
        try:
            plans.append(plan_run(next(composed), cwd=cwd, env=env, settle=settle, node_cpus=node_cpus))
        except ConfigError as err:
            if not point.values:
                raise
            raise type(err)(f"run {index} ({describe(point.values)}): {err.message}", hint=err.hint) from err
    _refuse_unused_values(points, plans)
    _refuse_same_runs(points, plans)
    uneven = next((list(plan.world.ranks_per_node) for plan in plans if not plan.world.is_even), None)
    roots = sorted({plan.config.run.root for plan in plans})
    require_all(
        [
            (len(roots) > 1, f"the runs of one sweep have several roots: {', '.join(roots)}", "drop run.root"),
            (
                len({plan.config.uses_cluster for plan in plans}) > 1,
                "some runs of the sweep ask for a cluster and some do not",
                "sweep sizes, e.g. +cluster=1x8,2x8",
            ),
            (
                uneven is not None,
                f"cluster.gpus_per_node={uneven}: a sweep is an array, and Slurm has no arrays of heterogeneous jobs",
                "give one number of GPUs for all nodes, or submit the runs one by one",
            ),
            (
                len({plan.config.sweep.max_parallel for plan in plans}) > 1,
                "sweep.max_parallel differs between the runs of one sweep",
                "give it one value",
            ),
            (
                any(plan.config.launch == "interactive" for plan in plans),
                "launch=interactive waits for one run, and this is a sweep",
                "drop -m, or launch=interactive",
            ),
        ]
    )
    require_all(_not_packable(plans))
    sweep = sweep_place(plans[0].run.root, sweep_id or _sweep_id_of(plans))
    plans = [_moved(plan, sweep.place) for plan in plans]
    return SweepPlan(
        sweep=sweep,
        elements=tuple(
            Element(index=index, run=plan.run, overrides=point.values)
            for index, (point, plan) in enumerate(zip(points, plans, strict=True))
        ),
        plans=tuple(plans),
    )


def _sweep_id_of(plans: Sequence[RunPlan]) -> str:
    """Returns a hash of the runs of a sweep, which does not depend on the order in which they were typed."""
    names = "\n".join(sorted(f"{plan.run.name}/{plan.run.run_id}" for plan in plans))
    return hashlib.sha256(names.encode()).hexdigest()[:8]


def _moved(plan: RunPlan, place: Path) -> RunPlan:
    """Returns the plan with its run in another place: all runs of a sweep lie where the sweep does."""
    return replace(plan, run=RunDirectory(place / plan.run.name / plan.run.run_id))


# A pack multiplies the request of a run's keys; these flags would set the same resources in another way.
_OWN_SHARES = re.compile(r"gres|gpus|gpus[-_]per.*|ntasks[-_]per.*|mem|tres.*|cores.*")


def _not_packable(plans: Sequence[RunPlan]) -> Iterator[Check]:
    """Yields checks for runs that cannot share a job (`sweep.pack`)."""
    config = plans[0].config
    pack = config.sweep.pack
    yield (
        len({plan.config.sweep.pack for plan in plans}) > 1,
        "sweep.pack differs between the runs of one sweep",
        "give it one value",
    )
    yield from _not_on_one_gpu(plans)
    if pack == 1:
        return
    yield (
        not config.uses_cluster,
        f"sweep.pack={pack} puts runs into one Slurm job, and these runs are trained on this machine",
        f"sweep.max_parallel={pack} trains so many at a time here",
    )
    max_parallel = config.sweep.max_parallel
    yield (
        max_parallel is not None and max_parallel < pack,
        f"sweep.max_parallel={max_parallel} is fewer than the runs of one job, sweep.pack={pack}",
        f"set sweep.max_parallel={pack} or more, or lower sweep.pack",
    )
    for plan in plans:
        cluster = plan.config.slurm
        request = plan.world.nodes_in_words + (f" and {cluster.spare_nodes} to spare" if cluster.spare_nodes else "")
        yield (
            plan.world.num_nodes > 1 or bool(plan.world.node_counts) or cluster.spare_nodes > 0,
            f"sweep.pack={pack} shares one node among runs, and {plan.run.name}/{plan.run.run_id} asks for {request}",
            "leave sweep.pack out, or ask for one node each: +cluster=1x1",
        )
        yield (
            plan.config.requeue.warm_ranks,
            f"sweep.pack={pack} shares one node among runs, each with its own CPUs; the ranks of "
            "requeue.warm_ranks=true would take another run's",
            "leave requeue.warm_ranks out",
        )
        for name in cluster.sbatch:
            yield (
                _OWN_SHARES.fullmatch(name) is not None,
                f"sweep.pack={pack} shares one node among runs, and cluster.sbatch.{name} says what the job gets",
                "use cluster.gpus_per_node, cluster.gpu_type, cluster.gpu_flag and cluster.memory_gb_per_gpu, which "
                "are meant for a run",
            )


def _not_on_one_gpu(plans: Sequence[RunPlan]) -> Iterator[Check]:
    """Yields checks for runs that cannot share a GPU (`sweep.runs_per_gpu`)."""
    sweep = plans[0].config.sweep
    yield (
        len({plan.config.sweep.runs_per_gpu for plan in plans}) > 1,
        "sweep.runs_per_gpu differs between the runs of one sweep",
        "give it one value",
    )
    if sweep.runs_per_gpu == 1:
        return
    setting = f"sweep.runs_per_gpu={sweep.runs_per_gpu} lets runs of one job share a GPU"
    yield (
        sweep.pack < sweep.runs_per_gpu,
        f"{setting}, and a job has {count(sweep.pack, 'run')}: sweep.pack={sweep.pack}",
        "set sweep.pack to the runs of a whole node: runs per GPU x its GPUs",
    )
    for plan in plans:
        if not plan.config.uses_cluster:
            continue
        yield (
            plan.config.slurm.gpu_flag == "none",
            f"{setting}, and cluster.gpu_flag=none asks for no GPU",
            "leave sweep.runs_per_gpu out: the runs of a pack share the node's CPUs",
        )
        yield (
            plan.world.num_ranks > 1,
            f"{setting}, and {plan.run.name}/{plan.run.run_id} asks for {plan.world.num_ranks} GPUs",
            "leave sweep.runs_per_gpu out, or ask for one GPU each: +cluster=1x1",
        )


def describe(point: Mapping[str, str]) -> str:
    """Returns a point as a person would type it, e.g. "optim.lr=0.001 seed=3"."""
    return " ".join(f"{key}={value}" for key, value in point.items())


def _refuse_same_runs(points: Sequence[Point], plans: Sequence[RunPlan]) -> None:
    index_of_path: dict[Path, int] = {}
    for index, plan in enumerate(plans):
        earlier = index_of_path.setdefault(plan.run.path, index)
        if earlier != index:
            hint = (
                "a key that says where or how a run is carried out does not make another run; drop it, "
                "or sweep run.name as well"
            )
            if points[earlier].values == points[index].values:
                hint = 'give each value once; to train it several times, sweep the seed: "seed=range(3)"'
            raise ConfigError(
                f"runs {earlier} and {index} of the sweep have the same configuration: "
                f"{describe(points[earlier].values)}, and {describe(points[index].values)}",
                hint=hint,
            )
