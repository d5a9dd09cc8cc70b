from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.files import append_line, last_lines
from slurm_train.rundir.timing import newest_training_line


def test_the_newest_line_with_a_loss_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_training_line(path) is None
    append_line(path, {"step": 1, "loss": 2.0})
    append_line(path, {"step": 2, "loss": 1.5})
    append_line(path, {"step": 2, "eval_loss": 1.4})
    assert newest_training_line(path) == {"step": 2, "loss": 1.5}
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert newest_training_line(path) == {"step": 2, "loss": 1.5}


@pytest.mark.parametrize("tail_bytes", [1, 30, 31, 60, 10_000])
def test_only_whole_lines_of_the_tail_are_read(tail_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(10, 20):
        append_line(path, {"step": step, "loss": 0.25, "note": "x"})
    lines = last_lines(path, tail_bytes=tail_bytes)
    assert [line["step"] for line in lines] == list(range(20 - len(lines), 20))
    assert len(lines) <= max(0, tail_bytes // 20)
