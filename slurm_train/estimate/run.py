"""What `plan` prints beyond the arithmetic: memory, traffic, GPU hours, how a run comes back, what it may lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slurm_train.config.batch import largest_local_size
from slurm_train.config.schema import OptimSection, RunConfig, RunSection
from slurm_train.estimate.cost import Cost, WorstLoss, estimate_cost, hours_in_words, worst_loss
from slurm_train.estimate.layouts import traffic
from slurm_train.estimate.memory import LayoutFacts, RankMemory, facts_of, fullest_rank, rank_memory, replica_memory
from slurm_train.estimate.models import FLOAT, CnnSize
from slurm_train.launch.continuation import how_it_returns
from slurm_train.launch.layout import spans_nodes
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.world import count_local_gpus
from slurm_train.slurm.policy import Preemption
from slurm_train.slurm.site import SiteFacts, default_account, default_qos, preemption_in

_MOST_KINDS = 3
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """What is known of a run before it begins."""

    on_gpu: bool
    rank: str
    """Whose memory it is: "rank", or "rank of stage 1" where a pipeline's stages differ."""
    memory: RankMemory | None
    memory_source: str
    """Where the activations are from, e.g. "formula, bfloat16"."""
    memory_note: str
    """Why the memory is not known, or what is missing from it; "" if nothing."""
    save_bytes: int
    """Copy that a background save writes from; in the host's memory."""
    sends: str
    """What the rank sends in a step, "" for whole replicas and where it is not known."""
    cost: Cost
    returns: str
    """How the run comes back, "" without a cluster."""
    loss: WorstLoss | None
    """None for a user's own function or script: only it knows its checkpoints."""

    @property
    def cost_unit(self) -> str:
        """What the hours are of."""
        return "GPU-hours" if self.on_gpu else "rank-hours"

    @property
    def total_bytes(self) -> int | None:
        """The peak of a rank's tensors: on its GPU, or in the host's memory where there is none."""
        if self.memory is None:
            return None
        return self.memory.total_bytes + (0 if self.on_gpu else self.save_bytes + self.memory.offloaded_bytes)

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of the plan's table."""
        rows = [("memory", self._memory_text() + (f"; {self.memory_note}" if self.memory_note else ""))]
        if self.sends:
            rows.append(("sends", self.sends))
        if self.returns or self.cost.left_h is not None:
            rows.append((self.cost_unit, self.cost.in_words))
        if self.returns:
            rows.append(("comes back", self.returns))
        if self.loss is not None and self.returns:
            rows.append(("lost at worst", self.loss.in_words))
        return rows

    def _memory_text(self) -> str:
        """Returns e.g. "70 MiB per rank: weights 4.8 MiB, ... (formula, float32)"."""
        memory = self.memory
        if memory is None or self.total_bytes is None:
            return "not known"
        parts = {
            "weights": memory.weight_bytes,
            "gradients": memory.gradient_bytes,
            "AdamW": memory.optimizer_bytes,
            "gathered": memory.gathered_bytes,
            "activations": memory.activation_bytes,
        }
        host = {"for saves": self.save_bytes, "offloaded": memory.offloaded_bytes}
        if not self.on_gpu:
            parts, host = {**parts, "copy for saves": self.save_bytes, "offloaded": memory.offloaded_bytes}, {}
        listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
        away = ", ".join(f"{size(count)} {name}" for name, count in host.items() if count)
        text = f"{size(self.total_bytes)} per {self.rank}: {listed} ({self.memory_source})"
        return f"{text}; on the host {away}" if away else text

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        memory = None
        if self.memory is not None:
            bytes_by_name = {**asdict(self.memory), "host_copy_bytes": self.save_bytes, "total_bytes": self.total_bytes}
            memory = {"source": self.memory_source, "on_gpu": self.on_gpu, **bytes_by_name}
        return {
            "memory": memory,
            "memory_note": self.memory_note,
            "cost": {"unit": self.cost_unit, **asdict(self.cost)},
            "comes_back": self.returns,
            "worst_loss": None if self.loss is None else self.loss.as_json(),
        }


def estimate_run(
    plan: RunPlan, *, facts: SiteFacts | None, env: Mapping[str, str], measured: Mapping[str, Any] | None = None
) -> PlanEstimate:
    """Returns what is known of a run.

    Args:
        plan: the run.
        facts: Slurm's answers about the site; None without a cluster, or where Slurm does not answer.
        env: environment, for counting local GPUs.
        measured: what `measure` found of the model (see `train.measure`), else the formulas count. Only "problem", in
            words, where the model could not be built.
    """
    config = plan.config
    limit_min, preemption = _limit_min(config, facts), _preemption(config, facts)
    cost = estimate_cost(plan, limit_min=limit_min)
    loss = None
    if config.trains:
        step_s = None if cost.speed is None else cost.speed.step_s
        loss = worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)
    on_gpu = has_gpus(config, env)
    return PlanEstimate(
        on_gpu=on_gpu,
        **_memory(plan, half=in_bfloat16(config, on_gpu=on_gpu), on_gpu=on_gpu, measured=measured),
        cost=cost,
        returns=_returns(config, preemption),
        loss=loss,
    )


def has_gpus(config: RunConfig, env: Mapping[str, str]) -> bool:
    """Returns whether the ranks will have GPUs."""
    return count_local_gpus(env) > 0 if config.cluster is None else config.cluster.gpu_flag != "none"


def in_bfloat16(config: RunConfig, *, on_gpu: bool) -> bool:
    """Returns whether matrix products will be in bfloat16."""
    return config.train.precision == "bfloat16" or (config.train.precision == "auto" and on_gpu)


def _memory(plan: RunPlan, *, half: bool, on_gpu: bool, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of `PlanEstimate` about memory and traffic."""
    config, kind = plan.config, "bfloat16" if half else "float32"
    note = "CUDA and NCCL come on top" if on_gpu else ""
    found: dict[str, Any] = {"rank": "rank", "memory": None, "memory_source": "", "save_bytes": 0, "sends": ""}
    if not config.trains or config.model is None:
        return found | {"memory_note": "only your own code knows"}
    largest = largest_local_size(config, plan.batch, ranks_per_node=plan.world.ranks_per_node)
    batch = replace(plan.batch, local_size=largest)
    facts = facts_of(config, plan.layout, batch, half=half)
    found |= {"memory_source": f"formula, {kind}", "memory_note": note}
    if not plan.layout.is_replicated:
        if facts is None:
            return found | {"memory_note": "no formula for this model in a layout; only the shipped GPT has one"}
        return found | _cut_memory(plan, facts)
    cnn = CnnSize.of(config.model, half=half)
    trained = other = kept = 0
    if measured is not None:
        if "trained_bytes" not in measured:
            return found | {"memory_note": measured["problem"]}
        missing = "" if "activation_bytes" in measured else f"activations are missing: {measured.get('problem', '?')}"
        found |= {"memory_source": f"measured, {kind}", "memory_note": missing}
        trained, other, kept = (measured.get(f"{name}_bytes", 0) for name in ("trained", "other", "activation"))
    elif facts is not None:
        trained, other = FLOAT * facts.shape.parameters, facts.shape.buffer_bytes
    elif cnn is not None:
        trained, kept = FLOAT * cnn.parameters, largest * (cnn.per_image + cnn.passing) + cnn.casts
    else:
        return found | {"memory_note": "`plan --measure` builds your model without its memory and looks"}
    if measured is None and facts is not None:
        memory = rank_memory(facts, stage=0)
    else:
        memory = replica_memory(trained=trained, other=other, activations=kept, accumulation=batch.accumulation)
    copies = config.checkpoint.background and config.checkpoint.every_steps is not None
    return found | {"memory": memory, "save_bytes": 3 * trained + other if copies else 0}


def _cut_memory(plan: RunPlan, facts: LayoutFacts) -> dict[str, Any]:
    """Returns the fields about the fullest rank of a layout that cuts the model."""
    stage, memory = fullest_rank(facts)
    rank = f"rank of stage {stage}" if plan.layout.pp > 1 else "rank"
    sent = []
    for axis, num_bytes in traffic(facts).items():
        links = "between" if spans_nodes(plan.layout, plan.world, axis) else "inside"
        sent.append(f"{size(num_bytes)} along {axis} ({links} nodes)")
    return {
        "rank": rank,
        "memory": memory,
        "sends": f"per {rank} and step: {', '.join(sent)} (formula)",
    }


def _returns(config: RunConfig, preemption: Preemption | None) -> str:
    if config.cluster is None:
        return ""
    if config.launch == "interactive":
        return "not by itself (launch=interactive); the same words continue it"
    return how_it_returns(preemption, requeue_enabled=config.requeue.enabled)


def _partition_name(config: RunConfig, facts: SiteFacts) -> str:
    assert config.cluster is not None
    return config.cluster.partition or next((one.name for one in facts.partitions if one.is_default), "")


def _limit_min(config: RunConfig, facts: SiteFacts | None) -> int | None:
    if config.cluster is None or config.cluster.time_limit_min is not None or facts is None:
        return None if config.cluster is None else config.cluster.time_limit_min
    name = _partition_name(config, facts)
    partition = next((one for one in facts.partitions if one.name == name), None)
    return None if partition is None else partition.default_time_min or partition.max_time_min


def _preemption(config: RunConfig, facts: SiteFacts | None) -> Preemption | None:
    if config.cluster is None or facts is None or not facts.settings:
        return None
    account = config.cluster.account or default_account(facts.associations)
    qos = config.cluster.qos or default_qos(facts.associations, account)
    return preemption_in(facts, qos, _partition_name(config, facts))


def sweep_rows(plans: Sequence[RunPlan], *, facts: SiteFacts | None, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the rows of `PlanEstimate` for the kinds of runs that a sweep has, side by side, and the hours of all.

    Runs that differ in seed, name and optimizer alone are of one kind. Three kinds are estimated at most, since past
    runs are read for each.
    """
    kinds: list[list[RunPlan]] = []
    for one in plans:
        alike = next((kind for kind in kinds if _work(kind[0]) == _work(one)), None)
        if alike is None:
            kinds.append([one])
        else:
            alike.append(one)
    estimates = [estimate_run(kind[0], facts=facts, env=env) for kind in kinds[:_MOST_KINDS]]
    more = f", and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    rows: dict[str, dict[str, None]] = {}
    for name, text in (row for estimate in estimates for row in estimate.rows()):
        rows.setdefault(name, {})[text] = None
    shown = [(name, " | ".join(texts) + more) for name, texts in rows.items()]
    if more:
        return shown
    parts = []
    for key, words in (
        ("per_attempt_h", "at most {} if each run has one attempt"),
        ("left_h", "about {} for all steps (estimate)"),
    ):
        hours = [getattr(one.cost, key) for one in estimates]
        if None not in hours:
            total_h = sum(each * len(kind) for each, kind in zip(hours, kinds, strict=True))
            parts.append(words.format(hours_in_words(total_h)))
    return [*shown, (f"all {len(plans)}", f"{estimates[0].cost_unit}: {'; '.join(parts)}")] if parts else shown


def _work(plan: RunPlan) -> object:
    """Returns what decides memory, speed and size of a run."""
    return replace(plan.config, seed=0, run=RunSection(), optim=OptimSection()), plan.batch, plan.world.size


def size(num_bytes: float) -> str:
    """Returns bytes for people, e.g. "512 B", "4.8 MiB", "1.3 GiB"."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.0f} {_UNITS[unit]}" if unit == 0 or num_bytes >= 100 else f"{num_bytes:.1f} {_UNITS[unit]}"
