"""Train, stop, the same command again, and what is done with the result: in whatever Python runs the tests.

The run and its continuation are typed in cold interpreters, as all of them are by a person.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.errors import EXIT_REQUEUE
from slurm_train.metrics import read_metrics
from slurm_train.rundir.paths import RunDirectory
from tests.support.command_line import TINY, Person, new_project
from tests.support.waiting import wait_for
from tests.support.warm_commands import WarmPerson

pytestmark = pytest.mark.distributed
WORDS = (*TINY, "run.name=a", "run.processes=2", "train.threads=1", "model.step_s=0.3", "checkpoint.keep=3")


def test_a_run_is_stopped_continued_exported_and_swept(tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    argv = [sys.executable, "-m", "slurm_train", *WORDS]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=person.folder, env=person.environment(), stdout=log, stderr=log)
    try:
        wait_for(lambda: _steps(person) >= 5, within_s=240, what="five steps")
        assert person.types("cancel", "a").code == 0
        assert process.wait(timeout=60) == EXIT_REQUEUE
    finally:
        process.kill()
    stopped_at = _steps(person)
    assert stopped_at < 12
    again = person.types(*WORDS)
    assert again.code == 0, again.err
    assert f"step {stopped_at}" in again.err, again.err
    person = WarmPerson(person.folder)
    assert person.types("checkpoint", "verify", "a").code == 0
    apart = person.types("checkpoint", "diff", f"a@{stopped_at}", "a")
    assert apart.code == 1 and "layers.0.weight" in apart.out, apart.err
    assert person.types("checkpoint", "export", "a", "model.safetensors").code == 0
    assert (person.folder / "model.safetensors").stat().st_size > 0
    swept = person.types("-m", *TINY, "run.name=s", "optim.lr=0.001,0.002", "run.processes=1", "train.threads=1")
    assert swept.code == 0, swept.err
    for name in ("a", "s"):
        report = person.types("report", name)
        assert report.code == 0, report.err


def _steps(person: Person) -> int:
    paths = list((person.folder / "runs").glob("a/*"))
    lines = list(read_metrics(RunDirectory(paths[0]).metrics)) if paths else []
    return max((int(line["step"]) for line in lines), default=0)
