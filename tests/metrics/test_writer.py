"""metrics.jsonl: whole lines, full precision, the newest attempt counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from slurm_train.metrics.writer import MetricsWriter, read_metrics


def test_floats_come_back_bit_for_bit_and_keys_in_order(tmp_path: Path) -> None:
    line = {"step": 1, "loss": math.pi / 3, "tiny": 5e-324, "attempt": 0, "mfu": None}
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(line)
    assert list(read_metrics(tmp_path / "metrics.jsonl")[0].items()) == list(line.items())


def test_a_newer_attempt_supersedes_from_its_first_step_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [(0, 10), (0, 20), (0, 30), (1, 20), (1, 30), (1, 40), (2, 40), (2, 50)]
    with MetricsWriter(path) as writer:
        for attempt, step in written:
            writer.write({"step": step, "attempt": attempt, "loss": 1.0})
    assert [(line["attempt"], line["step"]) for line in read_metrics(path)] == [
        (0, 10),
        (1, 20),
        (1, 30),
        (2, 40),
        (2, 50),
    ]


def test_repeating_the_evaluation_of_a_step_leaves_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for attempt, key, step in [
            (0, "loss", 4),
            (0, "eval_loss", 4),
            (0, "loss", 5),
            (0, "eval_loss", 5),
            (1, "eval_loss", 5),
            (1, "loss", 6),
        ]:
            writer.write({"step": step, "attempt": attempt, key: 1.0})
    assert [(line["attempt"], list(line)[2], line["step"]) for line in read_metrics(path)] == [
        (0, "loss", 4),
        (0, "eval_loss", 4),
        (0, "loss", 5),
        (1, "eval_loss", 5),
        (1, "loss", 6),
    ]


def test_a_line_torn_by_a_kill_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "attempt": 0}) + '\n{"step": 2, "att')
    with MetricsWriter(path) as writer:
        writer.write({"step": 2, "attempt": 1})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
