"""A run directory as a run would have left it: what a report is made of, without training anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.timing import PaceWindow, StepTimes, append_window

BEGAN_UNIX_S = 1_790_000_000.0
CAUSES = {
    "start_s": 5.0,
    "rendezvous_s": 1.0,
    "load_s": 1.0,
    "compile_s": 3.0,
    "step_s": 60.0,
    "data_wait_s": 10.0,
    "checkpoint_stall_s": 5.0,
    "evaluate_s": 10.0,
    "suspended_s": 0.0,
    "end_s": 5.0,
    "lost_work_s": 0.0,
}
"""A hundred seconds."""


def ended(number: int, *, reason: str = "done", job_id: str | None = "12", **facts: Any) -> list[dict[str, Any]]:
    """Returns the ledger lines of an attempt of a hundred seconds, 120 s after the one before."""
    begin = BEGAN_UNIX_S + 220.0 * number
    start = {"event": "start", "attempt": number, "time_unix_s": begin, "job_id": job_id, "restart_count": 0}
    end = {"event": "end", "attempt": number, "time_unix_s": begin + 100.0, "exit_code": 0, "reason": reason}
    place = {"nodes": ["node1", "node2"], "world_size": 2}
    return [start | place, end | {"action": "finish", "first_step": 0, "last_step": 100} | CAUSES | facts]


def steps(first: int, last: int, *, attempt: int = 0, **facts: Any) -> list[dict[str, Any]]:
    """Returns lines of metrics of steps that go well."""
    return [
        {
            "step": step,
            "loss": 1 + 4 * math.exp(-step / 40),
            "lr": 1e-3,
            "grad_norm": 0.5,
            "step_time_s": 0.1,
            "data_time_s": 0.001,
            "tokens_per_s": 1000.0,
            "mfu": None,
            "attempt": attempt,
            "world_size": 2,
            "time_unix_s": BEGAN_UNIX_S + step,
        }
        | facts
        for step in range(first, last + 1)
    ]


def evaluated(step: int, *, attempt: int = 0, **measures: float) -> dict[str, Any]:
    """Returns the line of an evaluation."""
    return {"step": step, **measures, "attempt": attempt, "time_unix_s": BEGAN_UNIX_S + step}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What lies in the directory; a value of None leaves the file out."""

    config: RunConfig | None = field(default_factory=RunConfig)
    ledger: Sequence[Mapping[str, Any]] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    saves: Sequence[Mapping[str, Any]] = ()
    provenance: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None
    max_steps: int | None = 100
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step by rank; such a rank leaves its step times of attempt 0."""
    windows: Sequence[PaceWindow] = ()
    """What ranks spent their steps on."""

    def write(self, run: RunDirectory) -> RunDirectory:
        """Writes it."""
        run.path.mkdir(parents=True)
        if self.config is not None:
            run.config.write_text(dump_config(self.config))
        if self.max_steps is not None:
            run.plan.write_text(json.dumps({"max_steps": self.max_steps}))
        for path, lines in (
            (run.attempts, self.ledger),
            (run.metrics, self.metrics),
            (run.events, self.events),
            (run.saves, self.saves),
        ):
            add_lines(path, lines)
        for path, value in ((run.provenance, self.provenance), (run.result, self.result)):
            if value is not None:
                path.write_text(json.dumps(value))
        for rank, seconds in self.slow_ranks.items():
            times = StepTimes(run, 0, rank=rank, host=f"node{rank // 2 + 1}")
            for _ in range(20):
                times.add(seconds, seconds / 100)
            times.keep()
        for window in self.windows:
            append_window(run, window)
        return run


def add_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines of JSON to a file, which is not made for none."""
    if lines:
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def run_in(folder: Path, run_id: str = "3f9a1c07") -> RunDirectory:
    """Returns the paths of a run below a folder."""
    return RunDirectory(folder / "runs" / "gpt" / run_id)
