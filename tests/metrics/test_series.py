"""metrics.jsonl as columns: the same lines as read_metrics gives, whatever the attempts did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.metrics import direction_of, largest_is_best, last_numbers, read_metrics, read_series
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.scores import Score, append_score


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


def test_scores_of_a_follower_are_read_with_the_rest(tmp_path: Path) -> None:
    """Of a step that the training has evaluated itself its own number counts, and the order of steps stays."""
    follower = RunDirectory(tmp_path / "evaluations" / "7d434a1ed8a2")
    follower.path.mkdir(parents=True)
    lines = [{"attempt": 0, "step": step, "loss": 1.0 / step} for step in (10, 20, 30)]
    lines.insert(2, {"attempt": 0, "step": 20, "eval_loss": 0.5})
    path = write(tmp_path / "metrics.jsonl", lines)
    for step in (30, 20, 15):
        values = {"eval_loss": 0.1 * step, "eval_wiki_loss": float(step), "eval_odd": math.nan}
        append_score(follower, Score(save_id=f"{step:08x}", step=step, attempt=0, values=values))
    counted = read_metrics(path)
    assert [line["step"] for line in counted] == [10, 15, 20, 20, 20, 30, 30]
    assert [line.get("eval_loss") for line in counted] == [None, 1.5, None, 0.5, None, None, 3.0]
    series = read_series(path)
    assert [*series.points("eval_loss")[1]] == [1.5, 0.5, 3.0]
    assert [*series.points("eval_wiki_loss")[0]] == [15.0, 20.0, 30.0]
    assert series.evaluations == ["eval_loss", "eval_wiki_loss"] and series.num_superseded == 0
    assert {*series.columns["attempt"]} == {0.0} and series.last("step") == 30.0


def test_a_run_that_has_diverged_has_no_value_from_before(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "attempt": 0, "loss": 2.0},
        {"step": 1, "attempt": 0, "eval_loss": 1.5, "eval_acc": 0.1},
        {"step": 2, "attempt": 0, "loss": None, "eval_loss": None},
        {"step": 3, "attempt": 0, "loss": None},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert last_numbers(path) == {"step": 3, "loss": 2.0, "eval_loss": None, "eval_acc": 0.1}


MORE_IS_BETTER = {
    True: "eval_accuracy eval_acc val/top5 eval_rouge1 eval_f1 val/AR@100 eval_mAP50 eval_score tokens_per_s mfu",
    False: "loss eval_loss eval_dice_loss top1_error eval_bits_per_byte eval_wer eval_perplexity eval_space",
}


@pytest.mark.parametrize("is_largest", MORE_IS_BETTER)
def test_of_what_more_is_better(is_largest: bool) -> None:
    names = MORE_IS_BETTER[is_largest].split()
    assert [name for name in names if largest_is_best(name) is is_largest] == names


DIRECTIONS = {
    "max": "eval_accuracy val_auc eval_ndcg@10 recall_at_fpr_5 eval_f1_score eval_map50 eval_acc_norm eval_pass@1",
    "min": "eval_loss val_loss_f1 eval_brier_score eval_cer eval_ppl eval_bits_per_byte fpr_at_95_recall eval_rmse",
    # Nobody can tell from the name alone.
    "": "val_pck_0.15 eval_neg_log_loss 1_minus_ssim eval_accuracy_gap eval_acc_stderr toxicity_score eval_inaccuracy",
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_direction_of_a_measure_is_what_its_name_says_or_unknown(direction: str) -> None:
    names = DIRECTIONS[direction].split()
    assert {name: direction_of(name) for name in names} == dict.fromkeys(names, direction)
