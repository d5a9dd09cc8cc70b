"""metrics.jsonl as columns: the same lines as read_metrics gives, whatever the attempts did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.metrics import read_metrics, read_series


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LINE = st.builds(
    lambda attempt, step, kind, value: {"attempt": attempt, "step": step, kind: value},
    st.integers(0, 3),
    st.integers(1, 12),
    st.sampled_from(["loss", "eval_loss"]),
    st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=60, deadline=None)
@given(lines=st.lists(LINE, max_size=25))
def test_it_holds_the_lines_that_count(lines: list[dict[str, Any]], tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.mktemp("run") / "metrics.jsonl", lines)
    series, counted = read_series(path), read_metrics(path)
    assert series.num_superseded == len(lines) - len(counted)
    for key in ("step", "attempt", "loss", "eval_loss"):
        values = [line.get(key) for line in counted]
        found = [None if math.isnan(value) else value for value in series.columns.get(key, [math.nan] * len(values))]
        assert found == values


def test_points_leave_out_lines_without_a_finite_value(tmp_path: Path) -> None:
    losses = [3.0, None, math.nan, math.inf, 1.0]
    lines = [{"attempt": 0, "step": step, "loss": loss, "note": "x", "flag": True} for step, loss in enumerate(losses)]
    series = read_series(write(tmp_path / "m.jsonl", lines))
    steps, values = series.points("loss")
    assert (list(steps), list(values)) == ([0.0, 4.0], [3.0, 1.0])
    assert (series.last("loss"), series.last("mfu")) == (1.0, None)
    assert set(series.columns) == {"attempt", "step", "loss"}, "texts and truth values are no numbers"
