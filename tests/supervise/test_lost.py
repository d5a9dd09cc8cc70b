from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.attempts import AttemptStart, close_attempt, open_attempt, read_ledger
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise.supervisor import close_lost, lost_because


def start(job_id: str | None = "7", restart_count: int = 0) -> AttemptStart:
    return AttemptStart(job_id=job_id, restart_count=restart_count, nodes=("node1",), world_size=1)


NOW = start(restart_count=1)
CASES = [
    ("Slurm says so", {"job_id": "7", "restart_count": 0}, ("NODE_FAIL",), "node_failure"),
    ("preempted too quickly to save", {"job_id": "7", "restart_count": 0}, ("PREEMPTED",), "preempted"),
    ("its own start counts", {"job_id": "7", "restart_count": 1}, ("PREEMPTED", "TIMEOUT"), "time_limit"),
    ("no accounting, restarted", {"job_id": "7", "restart_count": 0}, (), "node_failure"),
    ("no accounting, another job", {"job_id": "6", "restart_count": 0}, (), "lost"),
    ("the batch script was killed", {"job_id": "6", "restart_count": 0}, ("FAILED",), "lost"),
    ("a local run", {"job_id": None, "restart_count": 0}, (), "lost"),
]


@pytest.mark.parametrize(("entry", "ends", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_why_an_attempt_was_lost(entry: dict[str, object], ends: tuple[str, ...], reason: str) -> None:
    found, note = lost_because(entry, NOW, ends)
    assert found == reason and note


def test_only_open_attempts_are_closed_at_their_last_sign_of_life(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    close_attempt(run, open_attempt(run, start()), {"reason": "failed", "last_step": 3})
    lost = open_attempt(run, start())
    (run.attempt_logs(lost) / "rank_0.log").touch()
    close_lost(run, NOW, past_ends=lambda _job: (), last_step=8)
    first, second = read_ledger(run)
    assert first["reason"] == "failed" and first["last_step"] == 3
    assert (second["reason"], second["action"], second["last_step"]) == ("node_failure", "lost", 8)
    modified = (run.attempt_logs(lost) / "rank_0.log").stat().st_mtime
    assert second["end_time_unix_s"] == pytest.approx(max(modified, second["time_unix_s"]))
