"""Saving while training goes on, and the save of a stop, on real gloo ranks: the same bits, whatever the disk does."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from slurm_train.checkpoint.save_pace import SavePace, failure_every_s, interval_steps
from slurm_train.checkpoint.state import StagingBuffers
from slurm_train.checkpoint.verify import newest_verified, verify
from slurm_train.config.schema import OptimSection
from slurm_train.models.gpt import GPT
from slurm_train.rundir.events import read_events, read_saves
from slurm_train.rundir.lineage import read_origins
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.timing import Notice, Spent, read_measured, read_step_times
from slurm_train.train.facts import build_facts, build_saver
from slurm_train.train.optimizer import build_optimizer
from slurm_train.train.position import Position
from tests.support.ledgers import attempt_of
from tests.support.ranks import make_parts, make_rank
from tests.support.run_facts import run_with_notice
from tests.support.small_checkpoints import checkpoint_of, steps_in
from tests.train.small_runs import assert_same_steps, config_of, digest_of, finish, run_to_end, start

distributed = pytest.mark.distributed
STEPS = 24


def saving(*, model: dict[str, Any] | None = None, max_steps: int = STEPS, **checkpoint: Any) -> dict[str, Any]:
    return config_of(
        model={"dropout": 0.2, **(model or {})},
        checkpoint={"every_steps": 3, "keep": 20, **checkpoint},
        train={"max_steps": max_steps},
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for each save."""
    run = tmp_path_factory.mktemp("plain") / "run"
    run_to_end(run, saving(background=False))
    return run


def verified_steps(run: Path) -> list[int]:
    return [verify(path).step for path in list_checkpoints(run / "checkpoints")]


@distributed
@pytest.mark.parametrize("fault", [{}, {"slow_s": 0.3}], ids=["quick", "slow disk"])
def test_background_saves_change_no_bit_and_every_one_verifies(plain: Path, tmp_path: Path, fault: Any) -> None:
    run_to_end(tmp_path / "run", saving(), fault=fault)
    assert_same_steps(tmp_path / "run", plain)
    assert digest_of(tmp_path / "run") == digest_of(plain)
    assert verified_steps(tmp_path / "run") == list(range(STEPS, 0, -3))
    saves = read_saves(RunDirectory(tmp_path / "run"))
    assert [save["step"] for save in saves] == list(range(3, STEPS + 1, 3))
    assert all(save["bytes"] > 0 and save["save_s"] > 0 and save["stall_s"] > 0 for save in saves)


@distributed
def test_every_save_and_the_steps_of_every_rank_are_on_record(plain: Path) -> None:
    saves = read_saves(RunDirectory(plain))
    assert [save["step"] for save in saves] == list(range(3, STEPS + 1, 3))
    assert all(save["stall_s"] >= save["save_s"] > 0 for save in saves)
    ranks = read_step_times(RunDirectory(plain), 0)
    # An attempt's first step is start-up.
    assert [(times.rank, times.step.num, times.data_wait.num) for times in ranks] == [
        (rank, STEPS - 1, STEPS - 1) for rank in (0, 1)
    ]


@distributed
def test_a_resume_from_a_background_checkpoint_is_bitwise_equal(plain: Path, tmp_path: Path) -> None:
    """Rank 1 is killed in step 11: the save of step 6 or 9 is the last whole one, the thread may be in the next."""
    codes, text = finish(start(tmp_path / "run", saving(), fault={"kill_rank": 1, "kill_step": 11}))
    assert codes[1] == -9 and list_checkpoints(tmp_path / "run" / "checkpoints"), text
    assert "resuming from checkpoint_00000" in run_to_end(tmp_path / "run", saving(), attempt=1)
    assert digest_of(tmp_path / "run") == digest_of(plain)
    assert_same_steps(tmp_path / "run", plain)


@distributed
@pytest.mark.parametrize("background", [True, False])
def test_a_power_cut_takes_no_line_of_a_step_that_a_checkpoint_has(
    plain: Path, tmp_path: Path, background: bool
) -> None:
    run, config = tmp_path / "run", saving(background=background)
    codes, text = finish(start(run, config, fault={"dark_step": 6}))
    assert codes[0] == -9 and 6 in steps_in(run / "checkpoints"), text
    run_to_end(run, config, attempt=1)
    assert_same_steps(run, plain)


@distributed
def test_a_full_disk_in_a_periodic_save_is_reported_and_training_goes_on(plain: Path, tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", saving(), fault={"full_rank": 1, "full_step": 6})
    assert text.count("the checkpoint of step 6 failed, training continues; the previous checkpoint is intact") == 1
    assert "rank 1 on " in text and "No space left on device" in text
    failed = {save["step"]: save["error"] for save in read_saves(RunDirectory(tmp_path / "run")) if "error" in save}
    assert list(failed) == [6] and "No space left" in failed[6]
    assert verified_steps(tmp_path / "run") == [step for step in range(STEPS, 0, -3) if step != 6]
    assert digest_of(tmp_path / "run") == digest_of(plain)


@distributed
def test_a_full_disk_at_the_end_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", saving(), code=1, fault={"full_rank": 1, "full_step": STEPS})
    assert text.count("CheckpointError: rank 1 on ") == 2
    assert steps_in(tmp_path / "run" / "checkpoints")[0] == STEPS - 3


@distributed
def test_a_newer_attempt_ends_both_ranks_with_that_reason(tmp_path: Path) -> None:
    config = saving(model={"step_s": 0.02}, max_steps=2000)
    text = run_to_end(tmp_path / "run", config, code=1, fault={"overtake_step": 6})
    assert text.count("RunError: ") >= 2 and "attempt 1" in text
    assert steps_in(tmp_path / "run" / "checkpoints") == [3]


@distributed
def test_auto_saves_at_the_same_steps_on_all_ranks_and_changes_no_bit(plain: Path, tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", saving(every_steps="auto", failure_every_h=1e-9))
    assert "the next checkpoint is due in " in text
    assert {10, STEPS} <= set(verified_steps(tmp_path / "run"))
    assert digest_of(tmp_path / "run") == digest_of(plain)


DAY_S = 86400.0


def test_a_number_saves_at_its_multiples_and_none_never() -> None:
    due = {every: [step for step in range(1, 14) if SavePace(every).is_due(step)] for every in (4, None)}
    assert due == {4: [4, 8, 12], None: []}
    assert SavePace(4).saved(4, blocked_s=0.0, save_s=None) is None


@pytest.mark.parametrize(
    ("cost_s", "save_s", "step_s", "failure_s", "expected"),
    [
        (0.1, 1.0, 1.0, DAY_S, 132),  # sqrt(2 * 0.1 * 86400) = 131.5
        (10.0, 10.0, 1.0, 3600.0, 269),
        (0.0, 0.0, 1.0, DAY_S, 42),  # as if a save cost 10 ms
        (0.1, 300.0, 1.0, DAY_S, 600),  # twice as long as the disk needs
        (0.1, 1.0, 1000.0, DAY_S, 1),
    ],
)
def test_the_interval_follows_young_and_daly(cost_s, save_s, step_s, failure_s, expected) -> None:
    assert interval_steps(cost_s=cost_s, save_s=save_s, step_s=step_s, failure_every_s=failure_s) == expected


def test_the_ledger_corrects_what_was_expected() -> None:
    attempts = [
        attempt_of(time_unix_s=0.0, end_time_unix_s=600.0),
        attempt_of(time_unix_s=700.0, end_time_unix_s=1300.0),
        attempt_of(time_unix_s=1400.0),
    ]
    assert failure_every_s([], expected_s=DAY_S) == DAY_S
    assert failure_every_s(attempts, expected_s=DAY_S) == (DAY_S + 1200) / 3


def test_auto_measures_from_its_first_save_on(group_of_one: None) -> None:
    now = [0.0]
    pace, blocked_s = SavePace("auto", failure_every_s=DAY_S, clock=lambda: now[0]), 0.0
    due, news = [], []
    for step in range(101, 700):
        now[0] += 30.0 if step == 101 else 0.5  # the first step compiles
        if pace.is_due(step):
            due.append(step)
            blocked_s += 0.1
            now[0] += 0.1
            news.append(pace.saved(step, blocked_s=blocked_s, save_s=2.0))
    interval = math.ceil(math.sqrt(2 * 0.1 * DAY_S) / 0.5)
    assert due == [110, 110 + interval, 110 + 2 * interval]
    assert news[0] == f"the next checkpoint is due in {interval} steps: a save takes 0.10 s of training"
    assert news[1:] == [None, None]


class Numbers(list[int]):
    """What a checkpoint says of its data."""

    def fingerprint(self) -> str:
        return "da7a"


@pytest.mark.parametrize(
    ("model", "holds"), [(nn.BatchNorm1d(4), True), (GPT(num_layers=1, width=32, num_heads=2), False)]
)
def test_only_statistics_that_are_saved_hold_up_the_next_pass(
    model: nn.Module, holds: bool, group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(StagingBuffers, "hold_changes", lambda _: held.append(True))
    parts = make_parts(make_rank(tmp_path), model, build_optimizer(model, optim=OptimSection()), Numbers(range(64)))
    facts = build_facts(parts, Position(), callbacks={}, peak_lr=0.1)
    build_saver(facts, spent=Spent(begin_unix_s=0.0)).copy(0)
    assert bool(held) == holds


def test_a_save_takes_four_exchanges(group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed since the last save, the place to write to, what was written, and the end."""
    model = nn.Linear(4, 4)
    parts = make_parts(make_rank(tmp_path), model, build_optimizer(model, optim=OptimSection()), Numbers(range(64)))
    facts = build_facts(parts, Position(), callbacks={}, peak_lr=0.1)
    saver = build_saver(facts, spent=Spent(begin_unix_s=0.0))
    saver.write(1, waits=True)
    called: list[str] = []
    exchanges = ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "scatter_object_list")
    for name in exchanges:
        exchange = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *args, n=name, e=exchange, **kw: (called.append(n), e(*args, **kw))[1])
    saver.write(2, waits=True)
    assert called == ["all_reduce", *3 * ["all_gather_object"]]


def stop_of(run: RunDirectory) -> dict[str, Any]:
    (event,) = read_events(run, "stop")
    return event


@distributed
def test_a_run_stops_itself_before_its_limit_without_any_signal(tmp_path: Path, plain: Path) -> None:
    """The limit is 6 s away; a stop is given a margin, so the clock asks at the first look."""
    run = run_with_notice(tmp_path / "run", Notice(end_unix_s=time.time() + 6, limit_s=3600, kill_wait_s=5))
    config = saving(model={"step_s": 0.05}, every_steps=None)
    run_to_end(run.path, config, code=75)
    event = stop_of(run)
    assert event["asked_by"] == "clock" and event["saved"] and 0 < event["left_s"] <= 11
    assert verified_steps(run.path)[0] == event["step"] < STEPS
    measured = read_measured(run)
    assert measured is not None and measured.longest_save_s > 0 and measured.longest_step_s >= 0.05
    run_to_end(run.path, config, attempt=1)
    assert_same_steps(run.path, plain)


TOO_SHORT, LONG_ENOUGH = Notice(kill_wait_s=0.5, grace_s=0.0), Notice(kill_wait_s=0.5, grace_s=30.0)


@distributed
@pytest.mark.parametrize(("notice", "saved"), [(TOO_SHORT, False), (LONG_ENOUGH, True)], ids=["short", "long"])
def test_a_grace_shorter_than_a_save_is_not_spent_on_one(
    tmp_path: Path, plain: Path, notice: Notice, saved: bool
) -> None:
    run = run_with_notice(tmp_path / "run", notice)
    config = saving(model={"step_s": 0.2, "signal_at": 14, "only_in": str(tmp_path / "sent")}, every_steps=5)
    text = run_to_end(run.path, config, code=75, fault={"slow_s": 1.0})
    event = stop_of(run)
    assert (event["asked_by"], event["saved"]) == ("TERM", saved)
    assert event["save_s"] >= 1.0 and (event["left_s"] <= 0.5) is not saved
    assert verified_steps(run.path)[0] in ([event["step"]] if saved else [10, 5])
    assert ("without a save: 0 s are left and a save takes" in text) is not saved
    # Nothing is lost but steps: the next attempt ends with the bits of a run that was left alone.
    run_to_end(run.path, config, attempt=1)
    assert digest_of(run.path) == digest_of(plain)


@distributed
def test_a_damaged_checkpoint_that_was_passed_over_is_saved_again(tmp_path: Path) -> None:
    """Also in the attempt that has saved it, as after a rollback: its name and sizes would say that it is there."""
    run = RunDirectory(tmp_path / "run")
    config = config_of(train={"max_steps": 8}, checkpoint={"every_steps": 4, "keep": 2})
    run_to_end(run.path, config)
    older, damaged = (checkpoint_of(run.checkpoints, step) for step in (4, 8))
    data = damaged / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    text = run_to_end(run.path, config)
    assert f"passed over {damaged.name}" in text and f"resuming from {older.name}" in text
    found = newest_verified(run.checkpoints).newest
    assert found is not None and found[1].step == 8
    assert found[1].parent == name_of(older).save_id, "it says what it was trained from"
    assert (run.checkpoints / f"passed_over_{damaged.name}").is_dir(), "a person can still look at it"
    assert [origin.step for _, origin in read_origins(run)] == [0, 4]
