"""When a run would start and end with so many nodes and such a time limit: what `plan --when` prints.

Slurm says when each job would start (`sbatch --test-only`: by today's queue and the time limits in it, so usually too
late). How long the steps take is measured where a run of the same work is there, with any number of ranks, else a
simple model's; between numbers of ranks the time of a step is taken to fall in proportion, which is the best case.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_train.errors import ConfigError
from slurm_train.formatting import duration, number
from slurm_train.plan.cards import has_gpus, in_half
from slurm_train.plan.layouts import tokens_per_s
from slurm_train.plan.memory import facts_of
from slurm_train.plan.plan import RunPlan
from slurm_train.plan.speed import Speed, measured_speeds

START_S = 60.0
"""Assumed from the start of a job to its first step; the ranks import, meet and load."""
LEAST_STEP_S = 5e-3
"""A step of the smallest model on a GPU: it launches a thousand kernels (6 ms were measured on an H200)."""
MOST_JOBS = 64
"""Slurm plans the whole queue for each question."""
_SHARES = (4, 2, 1)
"""Time limits that are tried: the run's own, and these parts of it, which Slurm can fit in earlier."""
_RANGE = re.compile(r"([1-9][0-9]{0,4})(?:-([1-9][0-9]{0,4}))?")


def read_sizes(text: str) -> list[int]:
    """Returns numbers of nodes, e.g. "1-4,8" -> [1, 2, 3, 4, 8].

    Raises:
        ConfigError: it is something else, or too many.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 0 < first <= last:
            raise ConfigError(
                f"--when takes numbers of nodes, got {text}", hint="e.g. plan --when 1-4 or plan --when 2,4,8"
            )
        sizes |= set(range(first, min(last, first + MOST_JOBS) + 1))
    if len(sizes) * len(_SHARES) > MOST_JOBS:
        most = MOST_JOBS // len(_SHARES)
        raise ConfigError(
            f"--when {text} is more than {most} sizes, and Slurm is asked {len(_SHARES)} times for each",
            hint="name the sizes that you would take, e.g. plan --when 2,4,8,16",
        )
    return sorted(sizes)


def limits_of(limit_min: int | None) -> list[int | None]:
    """Returns the time limits to try, in minutes, shortest first; without a limit there is nothing to cut."""
    if limit_min is None:
        return [None]
    return [*sorted({max(1, math.ceil(limit_min / share)) for share in _SHARES})]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A size and a time limit, and what is known of the run with them."""

    num_nodes: int
    num_devices: int
    """GPUs, or ranks where there are none."""
    limit_min: int | None
    starts_in_s: float | None = None
    """Seconds until Slurm would start the job; None where it does not say."""
    work_s: float | None = None
    """Seconds that the steps left take; None where no pace is known."""
    num_attempts: int | None = None
    """Jobs, one after the other, until the run is finished."""
    ends_in_s: float | None = None
    """Seconds until then, if each later job waits as long as the first."""
    problem: str = ""
    """Why there is no such job."""

    @property
    def device_h(self) -> float | None:
        """Hours of all devices together."""
        if self.work_s is None or self.num_attempts is None:
            return None
        return self.num_devices * (self.work_s + self.num_attempts * START_S) / 3600

    def as_json(self) -> dict[str, object]:
        """Returns what `plan --when --json` prints."""
        names = ("num_nodes", "num_devices", "limit_min", "starts_in_s", "num_attempts", "ends_in_s", "device_h")
        return {**{name: getattr(self, name) for name in names}, "problem": self.problem}


def option_of(
    plan: RunPlan,
    *,
    left_steps: int | None,
    limit_min: int | None,
    starts_in_s: float | None,
    pace: Speed | None,
    warns_s: float,
) -> Option:
    """Returns what is known of a run with a size and a time limit.

    Args:
        plan: the run with this size.
        left_steps: steps that it has not taken yet; None where that is not known.
        limit_min: time limit of a job; None without one.
        starts_in_s: what Slurm says.
        pace: seconds of a step with this size.
        warns_s: how long before its limit a job stops to save.
    """
    option = Option(
        num_nodes=plan.world.num_nodes,
        num_devices=plan.num_devices,
        limit_min=limit_min,
        starts_in_s=starts_in_s,
    )
    if pace is None or left_steps is None:
        return option
    work_s = left_steps * pace.step_s
    if limit_min is None:
        num_attempts = 1
    else:
        trains_s = 60.0 * limit_min - warns_s - START_S
        if trains_s <= 0:
            return replace(option, work_s=work_s, problem="the limit is over before a step is taken")
        num_attempts = max(1, math.ceil(work_s / trains_s))
    if num_attempts > 1 and not plan.config.requeue.enabled:
        return replace(option, work_s=work_s, problem=f"{num_attempts} jobs, and requeue.enabled=false")
    ends_in_s = None
    if starts_in_s is not None:
        ends_in_s = num_attempts * (starts_in_s + START_S) + work_s
    return replace(option, work_s=work_s, num_attempts=num_attempts, ends_in_s=ends_in_s)


def pace_of(plan: RunPlan, env: Mapping[str, str]) -> Speed | None:
    """Returns the seconds of a step, measured with this number of ranks or another, else by a simple model.

    Args:
        plan: the run with a size.
        env: environment, for counting local GPUs.
    """
    speeds = measured_speeds(plan)
    if speeds:
        size = plan.world.num_ranks
        # The nearest number of ranks says most.
        nearest = min(speeds, key=lambda ranks: abs(math.log(ranks / size)))
        speed = speeds[nearest]
        if nearest == size:
            return speed
        return Speed(speed.step_s * nearest / size, f"{speed.source} with {nearest} ranks")
    config = plan.config
    on_gpu = has_gpus(config, env)
    facts = facts_of(config, plan.layout, plan.batch, half=in_half(config, on_gpu=on_gpu))
    if facts is None or not on_gpu:
        return None
    tokens = plan.batch.global_size * facts.positions
    return Speed(max(LEAST_STEP_S, tokens / tokens_per_s(facts, plan.world)), "a simple model of H100s")


def best_of(options: Sequence[Option]) -> Option | None:
    """Returns what ends first, else what starts first; of equal ones the one with fewer devices."""
    ending = [option for option in options if option.ends_in_s is not None]
    if ending:
        # Ends a minute apart are equal to what Slurm can tell.
        return min(ending, key=lambda option: (round((option.ends_in_s or 0.0) / 60), option.device_h or 0.0))
    starting = [option for option in options if option.starts_in_s is not None and not option.problem]
    return min(starting, key=lambda option: (option.starts_in_s or 0.0, -option.num_devices), default=None)


HEADER = ("nodes", "devices", "limit", "starts in", "jobs", "ends in", "device-hours", "")


def rows_of(options: Iterable[Option]) -> list[tuple[str, ...]]:
    """Returns the rows of the table under `HEADER`, the best marked."""
    listed = list(options)
    best = best_of(listed)
    rows: list[tuple[str, ...]] = []
    for option in listed:
        mark = "; ".join(option.problem.splitlines())
        if option is best:
            mark = "ends first" if option.ends_in_s is not None else "starts first"
        limit = "none" if option.limit_min is None else duration(60.0 * option.limit_min)
        starts = "now" if option.starts_in_s == 0 else duration(option.starts_in_s)
        rows.append(
            (
                str(option.num_nodes),
                str(option.num_devices),
                limit,
                starts,
                number(option.num_attempts),
                duration(option.ends_in_s),
                number(option.device_h, 2),
                mark,
            )
        )
    return rows
