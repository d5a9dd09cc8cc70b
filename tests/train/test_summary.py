from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.summary import write_result


def test_only_the_newest_attempt_writes_the_result(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    start = AttemptStart(job_id="7", restart_count=0, nodes=("node1",), world_size=1)
    older, newer = open_attempt(run, start), open_attempt(run, start)
    loop: Any = SimpleNamespace(position=SimpleNamespace(step=3, samples=48, loss=0.5), measures={"eval_loss": 0.25})
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        write_result(run, loop, weights_digest="0a", attempt=older, world_size=1)
    assert not run.result.exists()
    write_result(run, loop, weights_digest="0a", attempt=newer, world_size=1)
    result = json.loads(run.result.read_text())
    assert (result["step"], result["eval_loss"], result["attempt"]) == (3, 0.25, 1)
