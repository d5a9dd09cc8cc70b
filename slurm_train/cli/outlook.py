"""What `plan` says beyond the arithmetic: memory, GPU-hours, how the run comes back here, what it may lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_train.cli.arguments import login_name
from slurm_train.config.schema import RunConfig
from slurm_train.config.shares import largest_local_size
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.launch.continuation import how_it_returns
from slurm_train.launch.cost import Cost, estimate_cost
from slurm_train.launch.memory import MemoryEstimate, estimate_memory
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.world import count_local_gpus
from slurm_train.launch.worst_loss import WorstLoss, worst_loss
from slurm_train.models.footprint import footprint_of
from slurm_train.site.facts import SiteFacts, default_account, default_qos, gather_facts, preemption_in
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.preemption import Preemption

_FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of a run before it begins."""

    is_cut: bool
    """Whether the ranks hold parts of the model, so that the memory of a whole replica says nothing."""
    memory: MemoryEstimate | None
    memory_note: str
    """Why the memory is not known, or what is missing from it; "" if nothing."""
    cost: Cost
    cost_unit: str
    """ "GPU-hours", or "rank-hours" where there are no GPUs."""
    returns: str
    """How the run comes back, "" without a cluster."""
    loss: WorstLoss | None
    """None for a user's own function or script: only it knows its checkpoints."""

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of the plan's table."""
        memory = self.memory.in_words if self.memory is not None else "not known"
        # Where the model is cut, the layout's own rows say what a rank holds.
        rows = [] if self.is_cut else [("memory", memory + (f"; {self.memory_note}" if self.memory_note else ""))]
        if self.returns or self.cost.left_h is not None:
            rows.append((self.cost_unit, self.cost.in_words))
        if self.returns:
            rows.append(("comes back", self.returns))
        if self.loss is not None and self.returns:
            rows.append(("lost at worst", self.loss.in_words))
        return rows

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        return {
            "memory": None if self.memory is None else self.memory.as_json(),
            "memory_note": self.memory_note,
            "cost": {"unit": self.cost_unit, **self.cost.as_json()},
            "comes_back": self.returns,
            "worst_loss": None if self.loss is None else self.loss.as_json(),
        }


def read_outlook(plan: RunPlan, *, measure: bool, env: Mapping[str, str], cwd: Path) -> Outlook:
    """Returns what is known of a run; asks Slurm where it asks for a cluster.

    Args:
        plan: the run.
        measure: build the model without its memory, in a process of its own, where no formula is known.
        env: environment.
        cwd: where the run is typed.
    """
    cluster = plan.config.cluster
    facts = None if cluster is None else _facts(env)
    limit_min = _limit_min(plan.config, facts)
    cost = estimate_cost(plan, limit_min=limit_min)
    preemption = None if facts is None else _preemption(plan.config, facts)
    on_gpu = cluster.gpu_flag != "none" if cluster is not None else count_local_gpus(env) > 0
    is_cut = not plan.layout.is_replicated
    memory, note = None, "the layout cuts the model; its rows say what a rank holds"
    if not is_cut:
        memory, note = _memory(plan, on_gpu=on_gpu, measure=measure, env=env, cwd=cwd)
    returns = "" if cluster is None else _returns(plan.config, preemption)
    loss = None
    if plan.config.trains:
        step_s = None if cost.speed is None else cost.speed.step_s
        loss = worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)
    return Outlook(
        is_cut=is_cut,
        memory=memory,
        memory_note=note,
        cost=cost,
        cost_unit="GPU-hours" if on_gpu else "rank-hours",
        returns=returns,
        loss=loss,
    )


def _returns(config: RunConfig, preemption: Preemption | None) -> str:
    if config.launch == "interactive":
        return "not by itself (launch=interactive); the same words continue it"
    return how_it_returns(preemption, requeue_enabled=config.requeue.enabled)


def _facts(env: Mapping[str, str]) -> SiteFacts | None:
    commands = SlurmCommands(env)
    if not commands.is_available():
        return None
    try:
        return gather_facts(commands, user=login_name())
    except ClusterError:
        return None


def _partition_name(config: RunConfig, facts: SiteFacts) -> str:
    assert config.cluster is not None
    return config.cluster.partition or next((one.name for one in facts.partitions if one.is_default), "")


def _limit_min(config: RunConfig, facts: SiteFacts | None) -> int | None:
    if config.cluster is None or config.cluster.time_limit_min is not None or facts is None:
        return None if config.cluster is None else config.cluster.time_limit_min
    name = _partition_name(config, facts)
    partition = next((one for one in facts.partitions if one.name == name), None)
    return None if partition is None else partition.default_time_min or partition.max_time_min


def _preemption(config: RunConfig, facts: SiteFacts) -> Preemption | None:
    if config.cluster is None or not facts.settings:
        return None
    account = config.cluster.account or default_account(facts.associations)
    qos = config.cluster.qos or default_qos(facts.associations, account)
    return preemption_in(facts, qos, _partition_name(config, facts))


def _memory(
    plan: RunPlan, *, on_gpu: bool, measure: bool, env: Mapping[str, str], cwd: Path
) -> tuple[MemoryEstimate | None, str]:
    """Returns the estimate, and what is missing from it."""
    config = plan.config
    if not config.trains or config.model is None:
        return None, "only your own code knows"
    precision = config.train.precision
    half = precision == "bfloat16" or (precision == "auto" and on_gpu)
    if measure:
        return _measured(plan, half=half, on_gpu=on_gpu, env=env, cwd=cwd)
    context = (config.data or {}).get("context")
    found = footprint_of(
        config.model,
        batch_size=largest_local_size(config, plan.batch, ranks_per_node=plan.world.ranks_per_node),
        positions=context if isinstance(context, int) else None,
        half=half,
    )
    if found is None:
        return None, "`plan --measure` builds your model without its memory and looks"
    kind = "bfloat16" if half else "float32"
    estimate = _estimate(
        plan,
        trained_bytes=_FLOAT * found.parameters,
        other_bytes=found.buffer_bytes,
        activation_bytes=found.activation_bytes + found.temporary_bytes,
        on_gpu=on_gpu,
        source=f"formula, {kind}",
    )
    return estimate, "CUDA and NCCL come on top" if on_gpu else ""


def _measured(
    plan: RunPlan, *, half: bool, on_gpu: bool, env: Mapping[str, str], cwd: Path
) -> tuple[MemoryEstimate | None, str]:
    from slurm_train.cli.measure import measure_apart

    size = largest_local_size(plan.config, plan.batch, ranks_per_node=plan.world.ranks_per_node)
    try:
        found = measure_apart(plan.config, batch_size=size, half=half, env=env, cwd=cwd)
    except ConfigError as err:
        return None, err.message
    kept = found.get("activation_bytes")
    estimate = _estimate(
        plan,
        trained_bytes=found["trained_bytes"],
        other_bytes=found["other_bytes"],
        activation_bytes=kept or 0,
        on_gpu=on_gpu,
        source=f"measured, {'bfloat16' if half else 'float32'}",
    )
    return estimate, "" if kept is not None else f"activations are missing: {found.get('problem', 'not known')}"


def _estimate(
    plan: RunPlan, *, trained_bytes: int, other_bytes: int, activation_bytes: int, on_gpu: bool, source: str
) -> MemoryEstimate:
    settings = plan.config.checkpoint
    return estimate_memory(
        trained_bytes=trained_bytes,
        other_bytes=other_bytes,
        activation_bytes=activation_bytes,
        accumulation=plan.batch.accumulation,
        saves_in_background=settings.background and settings.every_steps is not None,
        on_gpu=on_gpu,
        source=source,
    )
