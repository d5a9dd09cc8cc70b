from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.layout import RunDirectory, require_room


def test_the_names_of_the_contract() -> None:
    run = RunDirectory(Path("/runs/gpt-stdlib/3f9a1c07"))
    assert (run.name, run.run_id) == ("gpt-stdlib", "3f9a1c07")
    properties = {
        name: str(getattr(run, name).relative_to(run.path))
        for name, value in vars(RunDirectory).items()
        if isinstance(value, property) and isinstance(getattr(run, name), Path)
    }
    assert properties == {
        "config": "config.yaml",
        "plan": "plan.json",
        "submit_script": "submit.sh",
        "code": "code",
        "code_index": "code.json",
        "changes": "changes.jsonl",
        "provenance": "provenance.json",
        "job": "job.json",
        "jobs": "jobs",
        "attempts": "attempts.jsonl",
        "epochs": "epochs",
        "logs": "logs",
        "metrics": "metrics.jsonl",
        "checkpoints": "checkpoints",
        "result": "result.json",
        "stop_file": "STOP",
        "lock": "lock.json",
        "submission_lock": "submission.json",
        "events": "events.jsonl",
        "tensorboard": "tensorboard",
        "trackers": "trackers",
        "saves": "saves.jsonl",
        "report": "report.html",
        "stragglers": "stragglers.jsonl",
    }
    assert run.rank_log(2, 31) == run.path / "logs" / "attempt_2" / "rank_31.log"


def test_a_path_that_leaves_no_room_for_the_files_is_refused(tmp_path: Path) -> None:
    require_room(RunDirectory(tmp_path / "a" / "b"))
    with pytest.raises(RunError, match=r"the path of the run has \d+ bytes, at most 3840 can be used"):
        require_room(RunDirectory(tmp_path.joinpath(*["x" * 200] * 20) / "a" / "b"))
    with pytest.raises(RunError, match=r"a name in the run's path has 256 bytes, at most 255 can be used"):
        require_room(RunDirectory(tmp_path / ("x" * 256) / "b"))
