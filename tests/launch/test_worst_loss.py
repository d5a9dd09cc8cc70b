from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurm_train.launch.worst_loss import WorstLoss, duration, worst_loss
from slurm_train.rundir.timing import account_path
from slurm_train.slurm.preemption import Preemption
from tests.support.plans import make_plan

REQUEUES = Preemption(by="qos", mode="REQUEUE", grace_s=15.0, kill_wait_s=5.0)
NOBODY = Preemption(by="nobody", mode="OFF", grace_s=0.0, kill_wait_s=30.0)
SUSPENDS = Preemption(by="partition", mode="SUSPEND", grace_s=0.0, kill_wait_s=30.0)


def loss(
    tmp_path: Path,
    *,
    preemption: Preemption | None = REQUEUES,
    step_s: float | None = None,
    save_s: float | None = None,
    limit_min: int | None = 60,
    **checkpoint: Any,
) -> WorstLoss:
    plan = make_plan(tmp_path, cluster={"nodes": 2}, checkpoint={"every_steps": 100, **checkpoint})
    if save_s is not None:
        path = account_path(plan.run, 0)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"longest_save_s": save_s}))
        plan.run.epochs.mkdir()
        (plan.run.epochs / "attempt_0").touch()
    return worst_loss(plan, preemption=preemption, step_s=step_s, limit_min=limit_min)


def test_before_anything_is_measured(tmp_path: Path) -> None:
    assert loss(tmp_path).in_words == (
        "100 steps with a lost node; as much by preemption, or nothing if a save takes less than 20 s; nothing at the "
        "time limit (asked 120 s before)"
    )


def test_measured_times_make_it_certain(tmp_path: Path) -> None:
    assert loss(tmp_path, step_s=0.5, save_s=3.0).in_words.startswith(
        "106 steps (about 53 s) with a lost node; nothing by preemption: 20 s to save in, 3.0 s needed so far"
    )


def test_a_save_that_is_too_slow_loses_what_a_node_loses(tmp_path: Path) -> None:
    assert "as much by preemption: 20 s to save in, 33.0 s needed so far" in loss(tmp_path, save_s=33.0).in_words


@pytest.mark.parametrize("preemption", [NOBODY, SUSPENDS])
def test_where_nobody_ends_jobs_nothing_is_lost_by_it(preemption: Preemption, tmp_path: Path) -> None:
    assert "; nothing by preemption;" in loss(tmp_path, preemption=preemption).in_words


def test_what_slurm_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    found = loss(tmp_path, preemption=None)
    assert "a preemption depends on its grace, which is not known" in found.in_words
    assert (found.preemption, found.notice_s) == ("", None)


def test_a_nodes_own_disk_goes_with_the_node(tmp_path: Path) -> None:
    assert loss(tmp_path, local_dir="/tmp", copy_every=5).interval_steps == 500


def test_no_more_is_lost_than_there_is(tmp_path: Path) -> None:
    assert loss(tmp_path, every_steps=10**6).interval_steps == 1000


@pytest.mark.parametrize(
    ("every_steps", "text"),
    [("auto", "what was done since the last checkpoint with"), (None, "everything since the start with")],
)
def test_an_interval_that_is_no_number(every_steps: str | None, text: str, tmp_path: Path) -> None:
    found = loss(tmp_path, every_steps=every_steps, step_s=1.0, save_s=1.0)
    assert found.node_loss_steps is None and found.in_words.startswith(text)


@pytest.mark.parametrize(("seconds", "text"), [(45.4, "45 s"), (200, "3 min"), (9000, "2.5 h")])
def test_durations_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
