from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.events import SaveLog, read_saves
from slurm_train.rundir.layout import RunDirectory


def test_a_save_has_a_line_with_its_size_stall_and_duration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = SaveLog(run, 3, now=lambda: 17.0)
    log.stalled(10, 0.25)
    log.stalled(10, 0.25)
    log.ended(10, num_bytes=1000, save_s=2.0)
    log.ended(20, num_bytes=0, save_s=1.0, error="no space left")
    lines = read_saves(run)
    assert lines[0] == {"attempt": 3, "step": 10, "bytes": 1000, "stall_s": 0.5, "save_s": 2.0, "time_unix_s": 17.0}
    assert (lines[1]["step"], lines[1]["stall_s"], lines[1]["error"]) == (20, 0.0, "no space left")


def test_a_step_that_was_saved_before_has_no_second_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = SaveLog(run, 0)
    log.ended(10, num_bytes=5, save_s=1.0)
    log.ended(10, num_bytes=0, save_s=0.1)
    assert [line["bytes"] for line in read_saves(run)] == [5]


def test_a_disk_that_refuses_costs_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "gone")
    SaveLog(run, 0).ended(10, num_bytes=5, save_s=1.0)
    assert read_saves(run) == []
