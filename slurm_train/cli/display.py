"""How a plan is printed: one table on stderr, and what of the user's code a run does not copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.terminal import note
from slurm_train.config.schema import TrackSection
from slurm_train.formatting import shorten
from slurm_train.launch.placement import layout_rows

if TYPE_CHECKING:
    from slurm_train.launch.plan import RunPlan
    from slurm_train.launch.snapshot import Source


def print_plan(plan: RunPlan) -> None:
    """Prints the plan as one table: run, world, batch arithmetic, learning rate, length, requeue."""
    print_rows(plan_rows(plan))


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints names and texts as two columns."""
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        note(f"  {name:<{width}}  {text}")


def plan_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Returns the rows of the plan's table."""
    config, world = plan.config, plan.world
    place = "this machine" if config.cluster is None else world.nodes_in_words
    rows = [("run", str(plan.run.path)), ("ranks", f"{world.size} = {place}")]
    if config.trains:
        rows += [
            ("global batch", plan.batch.as_sum()),
            *_shares_rows(plan),
            ("length", _length_text(plan)),
            ("peak lr", _lr_text(plan)),
            ("checkpoints", _checkpoint_text(plan)),
        ]
        per_rank = config.parallel.stages_per_rank
        rows[2:2] = layout_rows(plan.layout, world, plan.batch, stages_per_rank=per_rank)
    if config.track != TrackSection():
        from slurm_train.tools.trackers import asked_trackers

        rows.append(("trackers", ", ".join(asked_trackers(config.track)) or "none"))
    if config.container is not None:
        rows.append(("container", f"{config.container.kind} {config.container.image}"))
    if config.cluster is not None:
        rows += [("site", config.site)] if config.site else []
        rows.append(("requeue", _requeue_text(plan)))
    return rows


def _shares_rows(plan: RunPlan) -> list[tuple[str, str]]:
    if plan.config.batch.shares == "even":
        return []
    from slurm_train.config.batch import largest_local_size, planned_sizes, sizes_in_words

    batch, ranks_per_node = plan.batch, plan.world.ranks_per_node
    sizes = planned_sizes(plan.config, batch, ranks_per_node=ranks_per_node)
    if sizes is None:
        most = largest_local_size(plan.config, batch, ranks_per_node=ranks_per_node)
        return [("shares", f"by speed, measured at each start; a rank has at most {most} samples of a micro-batch")]
    nodes = [f"node {number}:" for number in range(1, plan.world.num_nodes + 1)]
    words = sizes_in_words(sizes, ranks_per_node=ranks_per_node, nodes=nodes)
    return [("shares", f"{words} of the {sum(sizes)} samples of a micro-batch")]


def _requeue_text(plan: RunPlan) -> str:
    if plan.config.launch == "interactive":
        return "never: launch=interactive"
    return "after preemption, time limit, node failure" if plan.config.requeue.enabled else "never"


def _length_text(plan: RunPlan) -> str:
    train, global_size = plan.config.train, plan.batch.global_size
    if train.max_epochs is None:
        return f"{train.max_steps} steps, {global_size * train.max_steps:,} samples"
    from slurm_train.config.batch import total_steps
    from slurm_train.data.shards import known_num_samples

    num_samples, epochs = known_num_samples(plan.config.data or {}, cwd=Path(plan.directory)), f"{train.max_epochs:g}"
    if num_samples is None:
        return f"{epochs} epochs; the ranks count the steps when they have opened the data"
    steps = total_steps(train, num_samples=num_samples, global_size=global_size)
    return f"{epochs} epochs of {num_samples:,} samples, {steps} steps"


def _lr_text(plan: RunPlan) -> str:
    optim = plan.config.optim
    if plan.lr == optim.lr:
        return f"{plan.lr:g}"
    return f"{plan.lr:g} ({optim.lr_retune} rule: {optim.lr:g} was tuned for a global batch of {optim.lr_global_size})"


def _checkpoint_text(plan: RunPlan) -> str:
    settings = plan.config.checkpoint
    if settings.every_steps == "auto":
        return f"as often as pays off with an interruption every {settings.failure_every_h:g} h, {settings.keep} kept"
    when = f"every {settings.every_steps} steps" if settings.every_steps else "at a stop and at the end only"
    return f"{when}, {settings.keep} kept"


def say_source(source: Source) -> None:
    """Prints which of the user's code a run would not have a copy of."""
    if source.left_out:
        note(f"not copied into the run: {shorten(source.left_out)}")
    if source.elsewhere:
        places = ",".join(source.elsewhere)
        note(f"imported from where it is edited, not from a copy in the run: {places.replace(',', ', ')}")
        note(f"to have the run copy it as well: run.snapshot_folders=[{places}]")
