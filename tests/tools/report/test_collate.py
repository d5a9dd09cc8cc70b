"""A sweep as CSV, Markdown and columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.sweep import Element
from slurm_train.status.run_status import read_statuses
from slurm_train.tools.report.collate import as_columns, as_csv, as_markdown, best_line, collate, number_or_text
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.support.run_files import RunFiles, evaluated, run_in, steps


def test_a_table_keeps_its_values() -> None:
    table = [{"index": 0, "x": 0.1 + 0.2, "y": "a|b"}, {"index": 1, "x": 2.5, "y": 3}, {"index": 2, "x": 1, "y": None}]
    assert as_csv(table) == "index,x,y\n0,0.30000000000000004,a|b\n1,2.5,3\n2,1,\n"
    assert as_markdown(table).splitlines()[2] == "| 0 | 0.3 | a\\|b |"
    assert as_columns(table) == {"index": [0, 1, 2], "x": [0.1 + 0.2, 2.5, 1.0], "y": ["a|b", "3", None]}


@pytest.mark.parametrize(
    ("objective", "best"),
    [(None, "best eval_loss: 1 at step 20 of run 0"), ("eval_acc", "best eval_acc: 0.9 at step 10 of run 1")],
)
def test_the_best_run_is_that_of_the_metric_that_the_sweep_is_judged_by(objective: str | None, best: str) -> None:
    accuracies = [0.5, 0.9, None]
    losses = [1.0, 2.0, None]
    table = [
        {
            "index": index,
            "run": f"gpt/{index}",
            "best_loss": 0.5,
            "best_eval_acc": accuracies[index],
            "best_eval_acc_step": 10,
            "best_eval_loss": losses[index],
            "best_eval_loss_step": 20,
        }
        for index in range(3)
    ]
    given = [{"seed": "1"}, {"seed": "2"}, {"seed": "3"}]
    line = best_line(table, given, objective=objective)
    assert line.startswith(f"{best}, gpt/")
    assert best_line([], [], objective=objective) == "" and "the least counts" not in line


def test_a_measure_whose_name_does_not_say_what_is_better_is_named() -> None:
    table = [{"index": n, "run": f"gpt/{n}", "best_eval_pck": 0.5 + n, "best_eval_pck_step": 10} for n in range(2)]
    line = best_line(table, [{}, {}], objective="eval_pck")
    assert line.startswith("best eval_pck: 0.5 at step 10 of run 0") and "the least counts as the best" in line


def test_the_value_of_one_batch_takes_no_column_of_another(tmp_path: Path) -> None:
    """Lightning logs "eval_loss_step" beside "eval_loss"."""
    run = run_in(tmp_path)
    RunFiles(metrics=[*steps(1, 4), evaluated(4, eval_loss=1.5, eval_loss_step=9.0, eval_per_step=2.0)]).write(run)
    (cells,) = collate(read_statuses([Element(run=run)], FakeSlurmCommands(is_available=False)))
    assert (cells["best_eval_loss"], cells["best_eval_loss_step"], cells["best_eval_per_step"]) == (1.5, 4, 2.0)


def test_a_text_that_looks_like_a_number_keeps_its_spelling() -> None:
    values = ["7", "-1", "0.001", "1e-05", "007", "1_000", "1e3", " 1", "abc"]
    assert [number_or_text(value) for value in values] == [7, -1, 0.001, 1e-05, "007", "1_000", "1e3", " 1", "abc"]
