"""What `plan` prints beyond the arithmetic: memory, traffic, GPU hours, how a run comes back, what it may lose.

Hours for the steps that are left are an estimate from measured step times. Reads run directories, writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from slurm_train.config.batch import largest_local_size
from slurm_train.config.frozen import load_config
from slurm_train.config.schema import ClusterSection, OptimSection, RunConfig, RunSection
from slurm_train.errors import SlurmTrainError
from slurm_train.formatting import byte_size, duration, number
from slurm_train.plan.cards import has_gpus, in_half, peak_flops_of
from slurm_train.plan.layouts import expected_tokens_per_s, traffic
from slurm_train.plan.memory import (
    FLOAT,
    LayoutFacts,
    RankMemory,
    facts_of,
    fullest_rank,
    measured_memory,
    num_averages,
    param_size,
)
from slurm_train.plan.placement import ranks_on_node, spans_nodes
from slurm_train.plan.plan import RunPlan
from slurm_train.rundir.files import last_lines
from slurm_train.rundir.lookup import is_own, list_runs
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.rundir.timing import read_measured, warning_lead_s
from slurm_train.slurm.flags import node_memory_gb
from slurm_train.slurm.job_limits import Demand, limits_in_partitions, longest_limit_min
from slurm_train.slurm.policy import Preemption, expedites_requeues, return_in_words, returning_codes_in_words
from slurm_train.slurm.site import SiteFacts, default_qos, preemption_in

_GIB = 1 << 30
_LITTLE_HOST = 8 * _GIB
"""Any node has so much to spare."""
_RANK_HOST = 6 * _GIB
"""Host memory of a rank beside its copy: Python, CUDA, NCCL, compilation."""
_LEAST_PASS_S = 0.02
"""A micro-batch that takes a GPU less time than this may wait for the host, which is in no formula."""
_MOST_KINDS = 3
_MOST_RUNS = 20
_MOST_LINES = 50


@dataclass(frozen=True, slots=True)
class Speed:
    """A step time."""

    step_s: float
    source: str
    """The run it was measured in, e.g. "gpt-stdlib/5d2030c7"; "" where a formula gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Hours of GPUs (of ranks, where there are none)."""

    per_attempt_h: float | None
    """Up to the time limit; None where there is none, or it is not known."""
    limit_min: int | None
    left_h: float | None
    """Estimate for the steps that are left; None where no speed was measured."""
    left_steps: int | None
    speed: Speed | None

    @property
    def in_words(self) -> str:
        """One line, e.g. "at most 256 per attempt (480 min); about 37 for 300 steps (estimate: ...)"."""
        parts = []
        if self.per_attempt_h is not None:
            parts.append(f"at most {number(self.per_attempt_h, 2)} per attempt ({self.limit_min} min)")
        if self.left_h is not None and self.speed is not None:
            where = f"in {self.speed.source}" if self.speed.source else "by a formula, not measured"
            estimate = f"{self.speed.step_s:.3g} s a step {where}"
            parts.append(f"about {number(self.left_h, 2)} for {self.left_steps} steps (estimate: {estimate})")
        return "; ".join(parts) or "not known: no time limit is set, and no run like it was measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstLoss:
    """Steps that have to be done again, at worst."""

    interval_steps: int | None
    """Between checkpoints that survive a lost node; None where that is not a number of steps."""
    step_s: float | None
    save_s: float | None
    """Longest save so far."""
    notice_s: float | None
    """From the first signal of a preemption to the end; None where nothing preempts the run, or it is not known."""
    preemption: str
    """never, requeued, cancelled, suspended; "" where it is not known."""
    warning_s: int
    """How long before its time limit a run is asked to save."""
    rhythm: str
    """When checkpoints are written, in words, where that is no number of steps."""

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        return asdict(self) | {"node_loss_steps": self.node_loss_steps}

    @property
    def node_loss_steps(self) -> int | None:
        """Steps that are lost with a node: an interval, and those done while the newest save is being written."""
        if self.interval_steps is None or not self.step_s or not self.save_s:
            return self.interval_steps
        return self.interval_steps + math.ceil(self.save_s / self.step_s)

    @property
    def in_words(self) -> str:
        """One line: a lost node, a preemption, the time limit."""
        node = self.rhythm if self.node_loss_steps is None else f"{self.node_loss_steps} steps"
        if self.node_loss_steps is not None and self.step_s:
            seconds = self.node_loss_steps * self.step_s
            node += f" (about {duration(seconds)})"
        if self.preemption in ("never", "suspended"):
            preempted = "nothing by preemption"
        elif self.notice_s is None:
            preempted = "a preemption depends on its grace, which is not known"
        else:
            so_far = "" if self.save_s is None else f" (so far {self.save_s:.1f} s)"
            preempted = f"nothing by preemption if a save takes less than {self.notice_s:.0f} s{so_far}"
        at_limit = f"nothing at the time limit (asked {self.warning_s} s before)"
        return f"{node} with a lost node; {preempted}; {at_limit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """What is known of a run before it begins."""

    on_gpu: bool
    compiles: bool
    """Whether model and loss are compiled; false for a user's own function or script."""
    rank: str = "rank"
    """Whose memory it is: "rank", or "rank of stage 1" where a pipeline's stages differ."""
    memory: RankMemory | None = None
    optimizer: str = ""
    """Its class."""
    memory_source: str = ""
    """Where the activations are from, e.g. "formula, bfloat16"."""
    memory_note: str
    """Why the memory is not known, or what is missing from it; "" if nothing."""
    save_bytes: int = 0
    """Copy of a rank's part that a background save writes from; in the host's memory."""
    host: str = ""
    """What saves take of a node's memory, and of the job's; "" where they take little."""
    speed: str = ""
    """What the run may expect, "" where it is known better or not at all."""
    sends: str = ""
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
        rows = {
            "torch.compile": "yes, in the first step of each attempt" if self.compiles else "",
            "memory": "; ".join(filter(None, (self._memory_text(), self.memory_note))),
            "host memory": self.host,
            "sends": self.sends,
            "speed": self.speed,
            self.cost_unit: self.cost.in_words if self.returns or self.cost.left_h is not None else "",
            "comes back": self.returns,
            "lost at worst": self.loss.in_words if self.loss is not None and self.returns else "",
        }
        return [(name, text) for name, text in rows.items() if text]

    def _memory_text(self) -> str:
        """Returns e.g. "70 MiB per rank: weights 4.8 MiB, ... (formula, float32)"."""
        memory = self.memory
        total = self.total_bytes
        if memory is None or total is None:
            return "not known"
        parts = {
            "weights": memory.weight_bytes,
            "gradients": memory.gradient_bytes,
            self.optimizer: memory.optimizer_bytes,
            "average": memory.average_bytes,
            "gathered": memory.gathered_bytes,
            "activations": memory.activation_bytes,
        }
        on_host = {"copy for saves": self.save_bytes, "offloaded": memory.offloaded_bytes}
        here, there = (_listed(parts), _listed(on_host)) if self.on_gpu else (_listed(parts | on_host), "")
        text = f"{byte_size(total)} per {self.rank}: {here} ({self.memory_source})"
        return f"{text}; on the host {there}" if there else text

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        memory = None
        if self.memory is not None:
            bytes_by_name = {**asdict(self.memory), "host_copy_bytes": self.save_bytes, "total_bytes": self.total_bytes}
            memory = {"source": self.memory_source, "on_gpu": self.on_gpu, **bytes_by_name}
        return {
            "compiles": self.compiles,
            "memory": memory,
            "memory_note": self.memory_note,
            "host_memory": self.host,
            "speed": self.speed,
            "cost": {"unit": self.cost_unit, **asdict(self.cost)},
            "comes_back": self.returns,
            "worst_loss": None if self.loss is None else self.loss.as_json(),
        }


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {byte_size(count)}" for name, count in parts.items() if count)


def estimate_run(
    plan: RunPlan, *, facts: SiteFacts | None, env: Mapping[str, str], measured: Mapping[str, Any] | None = None
) -> PlanEstimate:
    """Returns what is known of a run.

    Args:
        plan: the run.
        facts: Slurm's answers about the site; None without a cluster, or where Slurm does not answer.
        env: environment, for counting local GPUs.
        measured: what `measure` found of a model that no formula is known for (see `train.measure`). Only "problem", in
            words, where the model could not be built.
    """
    config = plan.config
    on_gpu = has_gpus(plan.config, env)
    limit_min, preemption, remarks = _site_policy(config, facts)
    half = in_half(config, on_gpu=on_gpu)
    expected = expected_speed(plan, half=half, env=env) if on_gpu else None
    cost = estimate_cost(plan, limit_min=limit_min, expected=None if expected is None else expected.step)
    is_measured = expected is None or cost.speed is not expected.step
    returns = ""
    if config.uses_cluster and not config.is_submitted:
        returns = "not by itself (launch=interactive); the same words continue it"
    elif config.is_submitted:
        is_expedited = facts is not None and not config.slurm.outlives_nodes and expedites_requeues(facts.settings)
        returns = (
            "; ".join([return_in_words(preemption, is_expedited=is_expedited), *remarks])
            if config.requeue.enabled
            else "not by itself (requeue.enabled=false); `resume` continues it"
        )
    step_s = None if cost.speed is None else cost.speed.step_s
    return PlanEstimate(
        on_gpu=on_gpu,
        compiles=plan.program.used.train.compiles(on_gpu=on_gpu),
        **_memory(plan, half=half, on_gpu=on_gpu, measured=measured),
        speed="" if expected is None or is_measured else expected.in_words,
        cost=cost,
        returns=returns,
        loss=worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)
        if plan.program.saves
        else None,
    )


_LARGEST_BETA2 = 0.99
"""Up to here a second moment of bfloat16 falls as one of float32 does (docs/optimizers.md)."""


def _memory(plan: RunPlan, *, half: bool, on_gpu: bool, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of `PlanEstimate` about memory and traffic."""
    config = plan.program.used
    if config.model is None:
        return {"memory_note": "only your own code knows"}
    growth = max(config.batch.growth.values(), default=1)
    batch = plan.batch.grown(growth)
    largest = largest_local_size(config, plan.batch, ranks_per_node=plan.world.ranks_per_node)
    facts = facts_of(config, plan.layout, replace(batch, local_size=largest), half=half)
    lower = "float16" if config.train.precision == "float16" else "bfloat16"
    kind = lower if half else "float32"
    notes = _memory_notes(config, on_gpu=on_gpu)
    if facts is not None:
        trained = facts.param_size * facts.shape.parameters
        other = facts.shape.buffer_bytes
        fields = _computed(plan, facts, kind=kind)
        optimizer_bytes = _optimizer_bytes(facts)
    elif not plan.layout.is_replicated:
        return {"memory_note": "no formula for this model in a layout; only the shipped GPT has one"}
    elif measured is None:
        return {"memory_note": "`plan --measure` builds your model without its memory and looks"}
    elif "trained_bytes" not in measured:
        return {"memory_note": measured["problem"]}
    else:
        if "activation_bytes" not in measured:
            notes.append(f"activations are missing: {measured.get('problem', '?')}")
        trained = measured["trained_bytes"]
        other = measured["other_bytes"]
        memory = measured_memory(measured, accumulation=batch.accumulation, averages=_averages_in_kind(config))
        fields = {"memory": memory, "memory_source": f"measured, {kind}"}
        optimizer_bytes = memory.optimizer_bytes
    copies = config.checkpoint.background and config.checkpoint.every_steps is not None
    saved = (1 + _averages_in_kind(config)) * trained + optimizer_bytes + other if copies else 0
    # Each rank copies the part that it writes: shards, and equal parts of what several ranks hold.
    save_bytes = -(-saved // plan.world.num_ranks)
    return {
        **fields,
        "memory_note": "; ".join(notes),
        "save_bytes": save_bytes,
        "host": _host_text(plan, save_bytes) if on_gpu else "",
        "optimizer": " and ".join(_optimizers(config)),
    }


def _host_text(plan: RunPlan, save_bytes: int) -> str:
    """Returns what saves take of a node's memory, and whether the job has as much; "" where that is little."""
    num_ranks = max(plan.world.ranks_per_node)
    copy_bytes = save_bytes * num_ranks
    if copy_bytes < _LITTLE_HOST:
        return ""
    text = f"{byte_size(copy_bytes)} per node for the copy that saves are written from"
    cluster = plan.config.slurm
    needed_gb = math.ceil((copy_bytes + num_ranks * _RANK_HOST) / _GIB / 8) * 8
    asked_gb = node_memory_gb(cluster, per_node=num_ranks, runs_per_gpu=plan.config.sweep.runs_per_gpu)
    if not plan.config.uses_cluster or asked_gb == 0:
        return text
    if asked_gb is None:
        return f"{text}; if the partition gives less, ask for cluster.memory_gb_per_node={needed_gb}"
    if asked_gb >= needed_gb:
        return f"{text}, of the {asked_gb} GiB of the job"
    return f"{text}, too much for the {asked_gb} GiB of the job: ask for cluster.memory_gb_per_node={needed_gb}"


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """What a run may expect where nothing was measured."""

    step: Speed
    in_words: str
    """One line, e.g. "about 6,900 tokens/s a GPU, 0.41 of the peak; not measured here"."""


def expected_speed(plan: RunPlan, *, half: bool, env: Mapping[str, str]) -> ExpectedSpeed | None:
    """Returns what a formula expects of a run on GPUs; None for other models, float32, and cards that are not known.

    Nor for small models, whose speed is the host's.

    The part of the peak is `mfu_6n_12ltc` (docs/how-fast.md).

    Args:
        plan: the run.
        half: whether matrix products are in a type of two bytes.
        env: environment, for looking at local GPUs.
    """
    peak_flops = peak_flops_of(plan.config, env)
    facts = facts_of(plan.config, plan.layout, plan.batch, half=half)
    if facts is None or peak_flops is None or not half:
        return None
    in_float8 = plan.config.train.precision == "fp8"
    tokens_per_s = expected_tokens_per_s(facts, plan.world, peak_flops=peak_flops, in_float8=in_float8)
    per_gpu = tokens_per_s / plan.world.num_ranks
    part = per_gpu * facts.shape.operations_per_token(facts.positions) / peak_flops
    step_s = plan.batch.global_size * facts.positions / tokens_per_s
    if step_s / plan.batch.accumulation < _LEAST_PASS_S:
        return None
    return ExpectedSpeed(
        step=Speed(step_s, ""),
        in_words=f"about {float(f'{per_gpu:.2g}'):,.0f} tokens/s a GPU, {part:.2f} of the peak; not measured here",
    )


def _optimizer_bytes(facts: LayoutFacts) -> int:
    """Returns the bytes that the optimizer keeps of the whole model."""
    layout = facts.layout
    return facts.param_size * layout.tp * sum(facts.kept_by_optimizer(stage) for stage in range(layout.pp))


def _computed(plan: RunPlan, facts: LayoutFacts, *, kind: str) -> dict[str, Any]:
    """Returns the fields that formulas give: memory of the fullest rank, and what it sends."""
    layout = plan.layout
    stage, memory = fullest_rank(facts)
    rank = f"rank of stage {stage}" if layout.pp > 1 else "rank"
    sent = []
    for axis, num_bytes in traffic(facts).items():
        text = f"{byte_size(num_bytes)} along {axis}"
        links = "inside nodes"
        if spans_nodes(layout, plan.world, axis):
            # In a ring only the last of a group's ranks on a node sends to another node.
            on_node = ranks_on_node(layout, plan.world, axis)
            links = "between nodes"
            links += f": over the network {byte_size(num_bytes // on_node)} for each" if on_node > 1 else ""
        sent.append(f"{text} ({links})")
    sends = "" if layout.is_replicated else f"per {rank} and step: {', '.join(sent)} (formula)"
    return {"memory": memory, "rank": rank, "memory_source": f"formula, {kind}", "sends": sends}


def _memory_notes(config: RunConfig, *, on_gpu: bool) -> list[str]:
    """Returns the text that `plan` prints after the numbers."""
    notes = ["CUDA and NCCL come on top"] if on_gpu else []
    classes = _optimizers(config)
    unknown = [name for name in classes if name not in ("AdamW", "Adam", "SGD", "Muon")]
    if unknown:
        notes.append(f"of {', '.join(unknown)}, 2 numbers per parameter are assumed")
    beta2 = config.optim.betas[1]
    if config.train.param_dtype == "bfloat16" and "AdamW" in classes and beta2 > _LARGEST_BETA2:
        notes.append(f"AdamW's second moment hardly falls in bfloat16 with optim.betas[1]={beta2}; use 0.95")
    return notes


def _optimizers(config: RunConfig) -> list[str]:
    """Returns the names of the classes that update parameters, each once."""
    targets = [config.optim._target_, *(rule._target_ for rule in config.optim.rules() if rule._target_)]
    return list(dict.fromkeys(target.rpartition(".")[2] for target in targets))


def _averages_in_kind(config: RunConfig) -> int:
    """Returns how many times the parameters averages take: they are float32, whatever the parameters are."""
    return num_averages(config) * FLOAT // param_size(config)


def _site_policy(config: RunConfig, facts: SiteFacts | None) -> tuple[int | None, Preemption | None, tuple[str, ...]]:
    """Returns what the site does with a run.

    Returns:
        The time limit of an attempt in minutes, None if unlimited or not known; how the site preempts it, None if not
        known; remarks about its return.
    """
    cluster = config.slurm
    if not config.uses_cluster or facts is None:
        return cluster.time_limit_min, None, ()
    names = _partitions_of(cluster, facts)
    demand = Demand(
        partitions=tuple(names), account=cluster.account or "", qos=cluster.qos or "", time_min=cluster.time_limit_min
    )
    limit_min = longest_limit_min(facts, demand)
    lone = [limits.lone_job for limits in limits_in_partitions(facts, demand)]
    remarks = tuple(filter(None, [*lone[:1], returning_codes_in_words(facts.settings)]))
    return limit_min, preemption_of(config, facts), remarks


def _partitions_of(cluster: ClusterSection, facts: SiteFacts) -> list[str]:
    """Returns the partitions that a job may start in; the longest limit of them says what it may cost."""
    default = next((partition.name for partition in facts.partitions if partition.is_default), "")
    return [part.strip() for part in (cluster.partition or default).split(",")]


def preemption_of(config: RunConfig, facts: SiteFacts) -> Preemption | None:
    """Returns how a site preempts the job of a run, by the first of its partitions; None where that is not known."""
    cluster = config.slurm
    partition = _partitions_of(cluster, facts)[0]
    qos = cluster.qos or default_qos(facts, partition, account=cluster.account)
    return preemption_in(facts, qos, partition) if facts.settings else None


def estimate_cost(plan: RunPlan, *, limit_min: int | None, expected: Speed | None = None) -> Cost:
    """Returns what a run may cost.

    Args:
        plan: the run.
        limit_min: time limit of an attempt, its own or the partition's; None if unlimited or not known.
        expected: its speed where none was measured.
    """
    speed = measured_speed(plan) or expected
    # Runs that share a GPU share its hours.
    num_gpus = plan.num_devices / plan.config.sweep.runs_per_gpu
    left_steps = None
    left_h = None
    if plan.max_steps is not None:
        done = max((int(line.get("step", 0)) for line in last_lines(plan.run.metrics)), default=0)
        left_steps = plan.max_steps - done
    if speed is not None and left_steps is not None:
        left_h = max(left_steps, 0) * speed.step_s * num_gpus / 3600
    return Cost(
        per_attempt_h=None if limit_min is None else num_gpus * limit_min / 60,
        limit_min=limit_min,
        left_h=left_h,
        left_steps=left_steps,
        speed=speed,
    )


def measured_speed(plan: RunPlan) -> Speed | None:
    """Returns the step time of this run, else of the newest one that trains the same model in the same world."""
    for run in _runs_like(plan):
        times = _step_times(run).get(plan.world.num_ranks)
        is_alike = bool(times) and PlanRecord.read(run.plan).batch == plan.record.batch
        if times and is_alike and _does_same_work(run, plan):
            return Speed(median(times), f"{run.name}/{run.run_id}")
    return None


def measured_speeds(plan: RunPlan) -> dict[int, Speed]:
    """Returns the step times of the same work and global batch by number of ranks; of each the newest."""
    speeds: dict[int, Speed] = {}
    for run in _runs_like(plan):
        by_size = _step_times(run)
        batch = PlanRecord.read(run.plan).batch
        if by_size.keys() <= speeds.keys() or batch is None or batch.global_size != plan.batch.global_size:
            continue
        if _does_same_work(run, plan):
            for size, times in by_size.items():
                speeds.setdefault(size, Speed(median(times), f"{run.name}/{run.run_id}"))
    return speeds


def _runs_like(plan: RunPlan) -> list[RunDirectory]:
    """Returns this run and the newest ones of its name."""
    runs = list_runs(plan.run.place)
    same_name = [run for run in runs if run.name == plan.run.name and is_own(run)]
    return [plan.run, *same_name[:_MOST_RUNS]]


def _step_times(run: RunDirectory) -> dict[int, list[float]]:
    """Returns the last step times of a run by its number of ranks."""
    times: dict[int, list[float]] = {}
    for line in [line for line in last_lines(run.metrics) if "step_time_s" in line][-_MOST_LINES:]:
        size = line.get("world_size")
        if isinstance(size, int) and size > 0:
            times.setdefault(size, []).append(float(line["step_time_s"]))
    return times


def _does_same_work(run: RunDirectory, plan: RunPlan) -> bool:
    """Returns whether a step of a run computes what one of the plan does."""

    def work(config: RunConfig) -> tuple[Any, ...]:
        return config.model, config.data, config.task, config.script, config.train.precision, config.train.compile

    try:
        return work(load_config(run.config)) == work(plan.config)
    except SlurmTrainError:
        return False


def worst_loss(
    plan: RunPlan, *, preemption: Preemption | None, step_s: float | None, limit_min: int | None
) -> WorstLoss:
    """Returns what a run may lose.

    Args:
        plan: the run.
        preemption: how its site preempts it; None where that is not known.
        step_s: a measured step time.
        limit_min: time limit of an attempt.
    """
    settings = plan.config.checkpoint
    measured = read_measured(plan.run)
    # What is on a node's own disk is lost with the node.
    reach = settings.copy_every if settings.local_dir else 1
    every = settings.every_steps
    limit_s = None if limit_min is None else 60.0 * limit_min
    return WorstLoss(
        interval_steps=min(every * reach, plan.max_steps or every * reach) if isinstance(every, int) else None,
        step_s=step_s,
        save_s=None if measured is None else measured.longest_save_s,
        notice_s=None if preemption is None else preemption.notice_s,
        preemption="" if preemption is None else preemption.outcome,
        warning_s=warning_lead_s(plan.config.requeue.warn_before_limit_s, plan.run, limit_s=limit_s),
        rhythm="what was done since the last checkpoint" if every == "auto" else "everything since the start",
    )


def sweep_rows(plans: Sequence[RunPlan], *, facts: SiteFacts | None, env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the rows of `PlanEstimate` for the kinds of runs that a sweep has, side by side, and the hours of all.

    Runs that differ in seed, name and settings of the optimizer alone are of one kind. Three kinds are estimated at
    most, since past runs are read for each.
    """
    kinds: dict[str, list[RunPlan]] = {}
    for plan in plans:
        optim = OptimSection(_target_=plan.config.optim._target_, groups=plan.config.optim.groups)
        work = (
            replace(plan.config, seed=0, run=RunSection(), optim=optim),
            bool(plan.config.optim.keywords.get("momentum")),
            plan.batch,
            plan.world.num_ranks,
        )
        kinds.setdefault(repr(work), []).append(plan)
    alike = list(kinds.values())
    estimates = [estimate_run(runs[0], facts=facts, env=env) for runs in alike[:_MOST_KINDS]]
    more = f", and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
    rows: dict[str, dict[str, None]] = {}
    for name, text in (row for estimate in estimates for row in estimate.rows()):
        rows.setdefault(name, {})[text] = None
    shown = [(name, " | ".join(texts) + more) for name, texts in rows.items()]
    parts = []
    for key, words in (
        ("per_attempt_h", "at most {} if each run has one attempt"),
        ("left_h", "about {} for all steps (estimate)"),
    ):
        hours = [getattr(estimate.cost, key) for estimate in estimates]
        if None not in hours and not more:
            total_h = sum(each * len(runs) for each, runs in zip(hours, alike, strict=True))
            parts.append(words.format(number(total_h, 2)))
    return [*shown, (f"all {len(plans)}", f"{estimates[0].cost_unit}: {'; '.join(parts)}")] if parts else shown
