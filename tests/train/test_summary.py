from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import RunError
from slurm_train.rundir.attempts import AttemptStart, open_attempt
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train.metrics import say_finished, say_stopped, write_result
from tests.support.ranks import make_rank


def test_only_the_newest_attempt_writes_the_result(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    start = AttemptStart(job_id="7", restart_count=0, nodes=("node1",), world_size=1)
    older, newer = open_attempt(run, start), open_attempt(run, start)
    loop: Any = SimpleNamespace(position=SimpleNamespace(step=3, samples=48, loss=0.5), measures={"eval_loss": 0.25})
    with pytest.raises(RunError, match="overtaken by attempt 1"):
        write_result(make_rank(run.path, attempt=older), loop, weights_digest="0a")
    assert not run.result.exists()
    write_result(make_rank(run.path, attempt=newer), loop, weights_digest="0a")
    result = json.loads(run.result.read_text())
    assert (result["step"], result["eval_loss"], result["attempt"]) == (3, 0.25, 1)


def test_a_run_without_held_out_samples_says_so(tmp_path: Path) -> None:
    loop: Any = SimpleNamespace(position=SimpleNamespace(step=3), measures={})
    said: list[str] = []
    say_finished(said.append, make_rank(tmp_path / "runs" / "a" / "b"), loop)
    assert "nothing was evaluated" in said[0] and "data.heldout" in said[0]


@pytest.mark.parametrize("returns", [True, False])
def test_a_stopped_rank_says_what_comes_by_itself(returns: bool, tmp_path: Path) -> None:
    loop: Any = SimpleNamespace(position=SimpleNamespace(step=3), not_saved="")
    said: list[str] = []
    config = RunConfig(cluster=ClusterSection() if returns else None)
    say_stopped(said.append, make_rank(tmp_path / "a" / "b", config), loop)
    assert ("the job comes back by itself" in said[1]) is returns and said[-1].endswith("slurm_train resume b")
