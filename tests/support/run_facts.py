"""Runs on disk as tests want them: what they have left behind, without having run."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.rundir.files import write_record
from slurm_train.rundir.heartbeat import Beat
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.timing import Notice
from tests.support.command_line import write
from tests.support.run_files import add_lines


def beat(rank: int = 0, *, age_s: float = 0.0, host: str = "node1", phase: str = "step", step: int = 1) -> Beat:
    """Returns a heartbeat that a rank wrote so long ago."""
    return Beat(
        rank=rank,
        host=host,
        pid=1,
        step=step,
        marks=1,
        phase=phase,
        settled=True,
        beats=1,
        written_unix_s=time.time() - age_s,
    )


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """What a run has left on disk."""

    cluster: bool = True
    job_ids: tuple[str, ...] = ()
    submitted_unix_s: float = 100.0
    ledger: tuple[dict[str, Any], ...] = ()
    metrics: tuple[dict[str, Any], ...] = ()
    result: dict[str, Any] | None = None
    logs: dict[str, str] = field(default_factory=dict)
    beats: tuple[Beat, ...] = ()
    """Of the newest attempt."""
    script: str | None = "#!/bin/bash\n#SBATCH --nodes=1\n"

    def write(self, run: RunDirectory) -> RunDirectory:
        """Writes it."""
        run.path.mkdir(parents=True)
        config = RunConfig(cluster=ClusterSection() if self.cluster else None)
        run.config.write_text(dump_config(config))
        run.plan.write_text(json.dumps({"max_steps": 400, "world": {"size": 1}}))
        if self.job_ids:
            run.job.write_text(json.dumps({"job_ids": list(self.job_ids), "submit_time_unix_s": self.submitted_unix_s}))
        add_lines(run.attempts, self.ledger)
        add_lines(run.metrics, self.metrics)
        for line in self.ledger:
            if line["event"] == "start":
                run.epochs.mkdir(exist_ok=True)
                (run.epochs / f"attempt_{line['attempt']}").write_text("{}")
                run.attempt_logs(line["attempt"]).mkdir(parents=True, exist_ok=True)
        write(run.logs, self.logs)
        for beat in self.beats:
            write_record(run.heartbeats(existing_attempts(run)[-1], beat.rank), beat)
        if self.result is not None:
            run.result.write_text(json.dumps(self.result))
        if self.script is not None and self.cluster:
            run.submit_script.write_text(self.script)
        return run


def attempt(number: int, *, job_id: str | None = "12", **end: Any) -> tuple[dict[str, Any], ...]:
    """Returns the ledger lines of an attempt; without facts about its end it still runs."""
    start = {"event": "start", "attempt": number, "time_unix_s": 10.0 * number, "job_id": job_id}
    if not end:
        return (start,)
    return (start, {"event": "end", "attempt": number, "time_unix_s": 10.0 * number + 5, **end})


def run_with_notice(folder: Path, notice: Notice, *, attempt: int = 0) -> RunDirectory:
    """Returns the run in a folder with an attempt that has been given a notice of its end."""
    run = RunDirectory(folder)
    run.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
    run.epochs.mkdir(exist_ok=True)
    (run.epochs / f"attempt_{attempt}").touch()
    write_record(run.notice(attempt), notice)
    return run
