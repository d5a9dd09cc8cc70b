"""A person at a command line, in the same process: fast enough for tables."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurm_train.cli.main import run as run_words
from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.rundir.layout import RunDirectory
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import Done


@dataclass(slots=True)
class Shell:
    """Types command lines in a folder and reads what they print."""

    folder: Path
    slurm: SlurmPrograms
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def types(self, *words: str) -> Done:
        """Runs a command line to its end in this process."""
        self.capture.readouterr()
        try:
            code = run_words(words)
        except SystemExit as err:
            code = err.code if isinstance(err.code, int) else 1
        captured = self.capture.readouterr()
        return Done(code, captured.out, captured.err)

    def leaves_slurm(self) -> None:
        """Takes Slurm's commands off the PATH; git stays."""
        bare = self.slurm.folder.with_name("bare")
        bare.mkdir()
        for name in ("git", "sh", "env"):
            (bare / name).symlink_to(str(shutil.which(name)))
        self.patch.setenv("PATH", str(bare))

    def left(self) -> list[str]:
        """Returns everything that lies in the folder now."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    def has_run(self, name: str = "gpt-stdlib", run_id: str = "3f9a1c07", **facts: Any) -> RunDirectory:
        """Puts a run on disk, see `RunFacts`."""
        return RunFacts(**facts).write(RunDirectory(self.folder / "runs" / name / run_id))


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
    script: str | None = "#!/bin/bash\n#SBATCH --nodes=1\n"

    def write(self, run: RunDirectory) -> RunDirectory:
        """Writes it."""
        run.path.mkdir(parents=True)
        config = RunConfig(cluster=ClusterSection() if self.cluster else None)
        run.config.write_text(dump_config(config))
        run.plan.write_text(json.dumps({"max_steps": 400, "world": {"size": 1}}))
        if self.job_ids:
            run.job.write_text(json.dumps({"job_ids": list(self.job_ids), "submit_time_unix_s": self.submitted_unix_s}))
        for path, lines in ((run.attempts, self.ledger), (run.metrics, self.metrics)):
            if lines:
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for line in self.ledger:
            if line["event"] == "start":
                run.epochs.mkdir(exist_ok=True)
                (run.epochs / f"attempt_{line['attempt']}").write_text("{}")
                run.attempt_logs(line["attempt"]).mkdir(parents=True, exist_ok=True)
        for name, text in self.logs.items():
            (run.logs / name).parent.mkdir(parents=True, exist_ok=True)
            (run.logs / name).write_text(text)
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


@pytest.fixture(autouse=True)
def _garbage_is_still_collected() -> Iterator[None]:
    """Short-lived commands switch the collector off; the tests live on."""
    yield
    gc.enable()


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """A person in an empty folder, with Slurm's commands at hand."""
    folder = tmp_path / "project"
    folder.mkdir()
    slurm = SlurmPrograms(tmp_path / "slurm" / "bin")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", slurm.path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "CUDA_"))]:
        monkeypatch.delenv(name)
    return Shell(folder, slurm, capsys, monkeypatch)
