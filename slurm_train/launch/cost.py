"""What a run will cost: hours of GPUs per attempt, and for the steps that are left, where their speed was measured.

The second is an estimate and says so. Reads run directories, writes nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from slurm_train.config.frozen import load_config
from slurm_train.config.schema import RunConfig
from slurm_train.errors import SlurmTrainError
from slurm_train.launch.plan import RunPlan
from slurm_train.rundir.files import read_json
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import list_runs
from slurm_train.rundir.progress import last_lines

_MOST_RUNS = 20
_MOST_LINES = 50


@dataclass(frozen=True, slots=True)
class Speed:
    """A measured step time."""

    step_s: float
    source: str
    """The run it was measured in, e.g. "gpt-stdlib/5d2030c7"."""


def measured_speed(plan: RunPlan) -> Speed | None:
    """Returns the step time of this run, else of the newest one that trains the same model in the same world."""
    others = (run for run in list_runs(plan.run.path.parent.parent) if run.name == plan.run.name)
    for run in [plan.run, *list(others)[:_MOST_RUNS]]:
        if (step_s := _step_s(run, plan)) is not None and _is_alike(run, plan):
            return Speed(step_s, f"{run.name}/{run.run_id}")
    return None


def _step_s(run: RunDirectory, plan: RunPlan) -> float | None:
    lines = [line for line in last_lines(run.metrics) if "step_time_s" in line][-_MOST_LINES:]
    times = [float(line["step_time_s"]) for line in lines if line.get("world_size") == plan.world.size]
    return median(times) if times else None


def _is_alike(run: RunDirectory, plan: RunPlan) -> bool:
    try:
        other = load_config(run.config)
    except SlurmTrainError:
        return False
    batch = (read_json(run.plan) or {}).get("batch")
    return _work(other) == _work(plan.config) and batch == plan.as_json()["batch"]


def _work(config: RunConfig) -> tuple[Any, ...]:
    """Returns what decides how long a step takes."""
    return config.model, config.data, config.task, config.script, config.train.precision, config.train.compile


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

    def as_json(self) -> dict[str, Any]:
        """Returns what `plan --json` prints."""
        return asdict(self)

    @property
    def in_words(self) -> str:
        """One line, e.g. "at most 256 per attempt (480 min); about 37 for 300 steps (estimate: ...)"."""
        parts = []
        if self.per_attempt_h is not None:
            parts.append(f"at most {hours_in_words(self.per_attempt_h)} per attempt ({self.limit_min} min)")
        if self.left_h is not None and self.speed is not None:
            measured = f"{self.speed.step_s:.3g} s a step in {self.speed.source}"
            parts.append(f"about {hours_in_words(self.left_h)} for {self.left_steps} steps (estimate: {measured})")
        return "; ".join(parts) or "not known: no time limit is set, and no run like it was measured"


def estimate_cost(plan: RunPlan, *, limit_min: int | None) -> Cost:
    """Returns what a run may cost.

    Args:
        plan: the run.
        limit_min: time limit of an attempt, its own or the partition's; None if unlimited or not known.
    """
    speed = measured_speed(plan)
    left_steps = plan.config.train.max_steps - _last_step(plan.run) if plan.config.trains else None
    left_h = None
    if speed is not None and left_steps is not None:
        left_h = max(left_steps, 0) * speed.step_s * plan.world.size / 3600
    return Cost(
        per_attempt_h=None if limit_min is None else plan.world.size * limit_min / 60,
        limit_min=limit_min,
        left_h=left_h,
        left_steps=left_steps,
        speed=speed,
    )


def _last_step(run: RunDirectory) -> int:
    return max((int(line.get("step", 0)) for line in last_lines(run.metrics)), default=0)


def hours_in_words(number: float) -> str:
    """Returns e.g. "256" or "0.37"."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
