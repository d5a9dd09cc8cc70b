"""metrics.jsonl: whole lines, full precision, the newest attempt counts."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.metrics import MetricsWriter, last_numbers, read_metrics
from slurm_train.rundir.files import to_json


def write(path: Path, *lines: dict[str, Any]) -> None:
    writer = MetricsWriter(path)
    for line in lines:
        writer.write(line)
    writer.close()


def test_floats_come_back_bit_for_bit_and_keys_in_order(tmp_path: Path) -> None:
    line = {"step": 1, "loss": math.pi / 3, "tiny": 5e-324, "attempt": 0, "mfu": None}
    write(tmp_path / "metrics.jsonl", line)
    assert list(read_metrics(tmp_path / "metrics.jsonl")[0].items()) == list(line.items())


def test_every_line_is_json_and_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """Python alone reads the word NaN; what is null is known as not finite to those who ask for the last numbers."""
    path = tmp_path / "metrics.jsonl"
    write(
        path, {"step": 1, "attempt": 0, "loss": 1.0}, {"step": 1, "attempt": 0, "eval_loss": math.nan, "mfu": -math.inf}
    )
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[1] == {"step": 1, "attempt": 0, "eval_loss": None, "mfu": None}
    assert last_numbers(path) == {"step": 1, "loss": 1.0, "eval_loss": None}
    assert json.loads(to_json({"a": [{"b": (math.nan, 2.0, "NaN")}]})) == {"a": [{"b": [None, 2.0, "NaN"]}]}


# Lines as "attempt:step", with an "e" for an evaluation.
COUNTING = {
    "a newer attempt supersedes older ones from its first step on": (
        "0:10 0:20 0:30 1:20 1:30 1:40 2:40 2:50",
        "0:10 1:20 1:30 2:40 2:50",
    ),
    "repeating the evaluation of a step leaves the step": (
        "0:4 0:4e 0:5 0:5e 1:5e 1:6",
        "0:4 0:4e 0:5 1:5e 1:6",
    ),
}


@pytest.mark.parametrize("case", COUNTING)
def test_lines_that_count(case: str, tmp_path: Path) -> None:
    written, counted = COUNTING[case]
    path = tmp_path / "metrics.jsonl"
    for word in written.split():
        attempt, step = word.rstrip("e").split(":")
        write(path, {"step": int(step), "attempt": int(attempt), "eval_loss" if word.endswith("e") else "loss": 1.0})
    found = [f"{line['attempt']}:{line['step']}{'e' * ('eval_loss' in line)}" for line in read_metrics(path)]
    assert found == counted.split()


def test_a_line_torn_by_a_kill_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "attempt": 0}) + '\n{"step": 2, "att')
    write(path, {"step": 2, "attempt": 1})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_a_line_cut_off_by_a_full_disk_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"step": 1, "attempt": 0})
    real = os.write

    def fills(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fills)
        with pytest.raises(OSError, match="No space left"):
            writer.write({"step": 2, "attempt": 0})
    writer.write({"step": 2, "attempt": 0})
    writer.write({"step": 3, "attempt": 0})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
