"""stragglers.jsonl: what is written can be read, whatever a killed writer or another version left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.step_times import (
    Finding,
    PaceWindow,
    RankPace,
    all_findings,
    append_window,
    newest_window,
    read_windows,
)

FINDING = Finding(
    kind="straggler",
    ranks=(2,),
    hosts=("node2",),
    factor=1.5,
    lost_share=0.3,
    sentence="rank 2 on node2 is slow",
    advice="see what else runs there",
)
WINDOW = PaceWindow(
    attempt=1,
    begin_unix_s=10.0,
    end_unix_s=15.0,
    from_step=3,
    to_step=40,
    samples=9,
    ranks=tuple(
        RankPace(rank=rank, host=f"node{rank // 2 + 1}", own_s=0.1 + rank, wait_s=0.2, data_s=0.03, uneven_s=0.0)
        for rank in range(4)
    ),
)


def test_windows_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert read_windows(run) == [] and newest_window(run) is None
    later = replace(WINDOW, from_step=40, to_step=80, findings=(FINDING,))
    append_window(run, WINDOW)
    append_window(run, later)
    assert read_windows(run) == [WINDOW, later]
    assert newest_window(run) == later


def test_lines_that_are_no_windows_are_passed_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    append_window(run, WINDOW)
    with run.stragglers.open("a") as file:
        file.write('{"attempt": 1, "hosts": [["node1", 2]], "own_s": [1]}\n')
        file.write(run.stragglers.read_text().splitlines()[0].replace("10.0", "Infinity") + "\n")
        file.write(run.stragglers.read_text().splitlines()[0].replace("[0.1,", '["<b>",') + '\n{"torn')
    assert read_windows(run) == [WINDOW]
    assert newest_window(run) == WINDOW


def test_a_finding_is_told_once_with_its_first_window() -> None:
    first, again = replace(WINDOW, findings=(FINDING,)), replace(WINDOW, to_step=99, findings=(FINDING,))
    next_attempt = replace(first, attempt=2)
    assert all_findings([WINDOW, first, again, next_attempt]) == [(first, FINDING), (next_attempt, FINDING)]
