"""A plan as the rows of one table. Prints nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_train.config.batch import planned_shares, schedule_samples, shares_in_words, total_steps
from slurm_train.config.schema import BatchSection, ClusterSection, TrackSection
from slurm_train.config.target import TARGET
from slurm_train.data.check import known_num_samples
from slurm_train.data.workers import AUTO, SPARE_CPUS, most_workers
from slurm_train.plan.placement import layout_rows
from slurm_train.plan.plan import RunPlan, unused_hint


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table: a name and a text each."""
    config = plan.config
    world = plan.world
    place = world.nodes_in_words if config.uses_cluster else "this machine"
    rows = [("run", str(plan.run.path)), ("ranks", f"{world.num_ranks} = {place}")]
    if plan.program.is_planned:
        rows += _training_rows(plan)
    if plan.unused_keys:
        keys = ", ".join(plan.unused_keys)
        rows.append(("not used", f"{keys}: the script does not get it; {unused_hint(plan, plan.unused_keys[0])}"))
    if config.track != TrackSection():
        rows.append(("trackers", ", ".join(config.track.tracker_names) or "none"))
    rows += [("hub", f"{files.key}: {files.words}") for files in plan.hub]
    if config.container is not None:
        rows.append(("container", f"{config.container.kind} {config.container.image}"))
    if not config.uses_cluster:
        return rows
    if config.site:
        rows.append(("site", config.site))
    rows += _meeting_rows(config.slurm, num_nodes=world.num_nodes)
    if plan.cpus.reason:
        rows.append(("CPUs", plan.cpus.reason))
    if plan.from_shell:
        rows.append(("shell", "; ".join(plan.from_shell)))
    rows += _lost_node_rows(plan, config.slurm)
    rows.append(("requeue", _requeue_text(plan)))
    return rows


def _meeting_rows(cluster: ClusterSection, *, num_nodes: int) -> list[tuple[str, str]]:
    """Returns where the ranks of several nodes meet, if that is set."""
    interface = cluster.rendezvous_interface
    place = f"{interface} of rank 0's node" if interface else cluster.rendezvous_address or "rank 0's node"
    if cluster.rendezvous_ports:
        place += f", ports {cluster.rendezvous_ports}"
    is_set = cluster.rendezvous_address or cluster.rendezvous_ports or interface
    return [("rendezvous", place)] if is_set and num_nodes > 1 else []


def _training_rows(plan: RunPlan) -> list[tuple[str, str]]:
    parallel = plan.config.parallel
    rows = [("parallel", plan.chosen)] if plan.chosen else []
    rows += layout_rows(
        plan.layout,
        plan.world,
        plan.batch,
        stages_per_rank=parallel.stages_per_rank,
        schedule=parallel.pipeline_schedule,
    )
    rows.append(("global batch", ", ".join([plan.batch.as_sum(), *_growth(plan.config.batch)])))
    rows += _shares_rows(plan)
    rows += _reading_rows(plan)
    rows += _context_rows(plan)
    rows.append(("length", _length_text(plan)))
    rows.append(("peak lr", _lr_text(plan)))
    rows.append(("schedule", _schedule_text(plan)))
    rows.append(("checkpoints", _checkpoint_text(plan)))
    return rows


def _shares_rows(plan: RunPlan) -> list[tuple[str, str]]:
    if isinstance(plan.config.batch.shares, str):
        return []
    ranks_per_node = plan.world.ranks_per_node
    shares = planned_shares(plan.config, plan.batch, ranks_per_node=ranks_per_node)
    nodes = [f"node {number}:" for number in range(1, plan.world.num_nodes + 1)]
    return [("shares", shares_in_words(shares, ranks_per_node=ranks_per_node, nodes=nodes))]


def _reading_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns how a data set of the user's own is read by `data.num_workers=auto`."""
    data = plan.config.data or {}
    is_shipped = str(data.get(TARGET, "slurm_train.")).startswith("slurm_train.")
    if is_shipped or data.get("num_workers", AUTO) != AUTO or data.get("prefetch"):
        return []
    cpus = plan.cpus_per_rank
    if cpus is None:
        text = f"by processes, where a sample takes time and a rank has {SPARE_CPUS + 1} CPUs or more"
    elif most_workers(cpus):
        text = f"by up to {most_workers(cpus)} processes per rank, where a sample takes time; a rank has {cpus} CPUs"
    else:
        text = f"by the training process: a rank has {cpus} CPUs"
    return [("reading", f"{text} (data.num_workers=auto)")]


def _context_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns a row where samples are longer than what a model of transformers was made for.

    Not refused: positions that are computed (rotary ones) can be trained further.
    """
    context = (plan.config.data or {}).get("context")
    known = known_positions(plan.config.model or {}, cwd=Path(plan.directory))
    if known is None or not isinstance(context, int) or context <= known:
        return []
    text = f"data.context={context} is longer than the {known} positions of the model's configuration"
    return [("context", f"{text}: the others are new to it, or samples are cut, where it has a table of positions")]


def known_positions(model: Mapping[str, Any], *, cwd: Path) -> int | None:
    """Returns how many positions the configuration of a model of transformers says that it has been made for.

    Args:
        model: that section of the configuration.
        cwd: the folder that a relative `path` starts from.

    Returns:
        None where nothing says it: another model, a repository of the Hub, the defaults of an architecture.
    """
    if not str(model.get(TARGET)).startswith("slurm_train.models.causal_lm"):
        return None
    saved: Any = {}
    if model.get("path"):
        path = cwd / str(model["path"])
        with contextlib.suppress(OSError, ValueError):
            saved = json.loads((path if path.suffix == ".json" else path / "config.json").read_text(encoding="utf-8"))
    typed = model.get("config")
    config = {**(saved if isinstance(saved, dict) else {}), **(typed if isinstance(typed, Mapping) else {})}
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    scaling = config.get("rope_scaling")
    factor = scaling.get("factor", 1.0) if isinstance(scaling, Mapping) else 1.0
    return int(positions * factor) if isinstance(positions, int) and isinstance(factor, (int, float)) else None


def _requeue_text(plan: RunPlan) -> str:
    if plan.config.launch == "interactive":
        return "never: launch=interactive"
    return "after preemption, time limit, node failure" if plan.config.requeue.enabled else "never"


def _lost_node_rows(plan: RunPlan, cluster: ClusterSection) -> list[tuple[str, str]]:
    """Returns what happens in a job that survives the loss of nodes when one is lost or bad, and the cost of that."""
    if not cluster.outlives_nodes:
        return []
    world = plan.world
    rows = []
    if cluster.spare_nodes:
        additional = plan.num_devices / world.num_ranks - 1
        text = f"{cluster.spare_nodes}, used in place of a lost or bad node: {additional:.0%} more node hours"
        rows.append(("spare nodes", text))
    if world.node_counts:
        text = f"the ranks start again on those that are left, {world.fewest_nodes} at least, in the same job"
        skipped = [count for count in range(world.fewest_nodes, world.num_nodes) if count not in world.node_counts]
        if skipped:
            text += f"; the layout does not fit {', '.join(map(str, skipped))}, of which some wait"
        rows.append(("a lost node", text))
        rows.append(("more nodes", _growth_text(plan)))
    return rows


def _growth_text(plan: RunPlan) -> str:
    """Returns when a run with a range of nodes is requeued for more of them."""
    every_min = plan.program.used.requeue.grow_every_min
    is_never = not plan.config.requeue.enabled or plan.config.launch == "interactive"
    if every_min is None or is_never:
        return "never asked for: the next requeue gives what is free then"
    interval = "30 min; not where jobs are preempted" if every_min == "auto" else f"{every_min} min"
    return f"asked for at a save, at most every {interval}; the job is requeued for them where that pays"


def _growth(batch: BatchSection) -> list[str]:
    return [f"x {factor} after step {step}" for step, factor in batch.growth.items()]


def _length_text(plan: RunPlan) -> str:
    train = plan.config.train
    global_size = plan.batch.global_size
    if plan.num_samples is not None:
        return f"{train.max_steps} steps, {plan.num_samples:,} samples"
    num_samples = known_num_samples(plan.config.data or {}, cwd=Path(plan.directory))
    epochs = f"{train.max_epochs:g}"
    if num_samples is None:
        return f"{epochs} epochs; the ranks count the steps when they have opened the data"
    steps = total_steps(plan.config, num_samples=num_samples, global_size=global_size)
    return f"{epochs} epochs of {num_samples:,} samples, {steps} steps"


def _lr_text(plan: RunPlan) -> str:
    optim = plan.config.optim
    if optim.lr_retune != "none" and optim.lr_global_size is None:
        return f"{plan.lr:g}, for this global batch: optim.lr_retune={optim.lr_retune} has no optim.lr_global_size"
    if optim.lr_retune == "none" and optim.lr_global_size not in (None, plan.batch.global_size):
        return f"{plan.lr:g}, unchanged: optim.lr_global_size={optim.lr_global_size} needs optim.lr_retune"
    if plan.lr == optim.lr:
        return f"{plan.lr:g}"
    return f"{plan.lr:g} ({optim.lr_retune} rule: {optim.lr:g} was tuned for a global batch of {optim.lr_global_size})"


def _schedule_text(plan: RunPlan) -> str:
    """Returns e.g. "cosine, warm-up over 3 of 60 steps": whoever has counted steps in place of samples sees it here."""
    optim = plan.config.optim
    if not isinstance(optim.schedule, str):
        return str(optim.schedule.get(TARGET))
    if plan.num_samples is None or plan.config.batch.growth:
        known = "" if optim.warmup_samples is None else f", warm-up over {optim.warmup_samples:,} samples"
        return f"{optim.schedule}{known}"
    warmup, decay = schedule_samples(optim, total_samples=plan.num_samples)
    global_size = plan.batch.global_size
    fall = f", fall over the last {decay / global_size:.4g}" if optim.schedule == "wsd" else ""
    return f"{optim.schedule}, warm-up over {warmup / global_size:.4g}{fall} of {plan.max_steps} steps"


def _checkpoint_text(plan: RunPlan) -> str:
    settings = plan.config.checkpoint
    if settings.every_steps == "auto":
        return f"as often as pays off with an interruption every {settings.failure_every_h:g} h, {settings.keep} kept"
    interval = f"every {settings.every_steps} steps" if settings.every_steps else "at a stop and at the end only"
    return f"{interval}, {settings.keep} kept"
