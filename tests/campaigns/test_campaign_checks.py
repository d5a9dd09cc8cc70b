"""The checks of the campaigns on Slurm pass what was as promised, and find every planted violation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.doctor.node_rules import HINTS, OTHER_CODES
from tests.campaigns import arrays, budgets, cancel, hang, silence, split_brain, strikes
from tests.campaigns.latency import Stop
from tests.campaigns.preflight_faults import FAULTS
from tests.campaigns.record import Tally
from tests.support.small_checkpoints import make_checkpoint

pytestmark = pytest.mark.full

CANCELLED: dict[str, Any] = {
    "form": "scancel",
    "state": "CANCELLED",
    "restarts_then": 1,
    "restarts": 1,
    "jobs": ["12"],
    "attempts_late_s": [-20.0, 2.0],
    "step_late_s": 1.0,
    "status": "cancelled",
    "is_finished": False,
}
NOT_CANCELLED: dict[str, tuple[Any, str]] = {
    "state": ("FAILED", "the job is FAILED"),
    "restarts": (2, "Restarts rose from 1 to 2"),
    "jobs": (["12", "13"], "the run has other jobs: 12, 13"),
    "attempts_late_s": ([-20.0, 11.0], "an attempt began 11.0 s later"),
    "step_late_s": (12.0, "it still trained 12.0 s later"),
    "status": ("preempted", "status calls it 'preempted'"),
    "is_finished": (True, "it was finished before it was cancelled"),
}

SENTENCE = "rank 1 on node2 does not run (stopped or lost), in step at step 7 since 8 s; 1 rank waits for it"
FIRST = {"attempt": 0, "reason": "failed", "action": "relaunch"}
HANG: dict[str, Any] = {
    "rank": 1,
    "host": "node2",
    "limit_s": 8.0,
    "ended_s": 11.0,
    "events": [{"ranks": [1], "sentence": SENTENCE}],
    "stacks": [0],
    "ledger": [FIRST, {"attempt": 1, "reason": "done", "action": "finish"}],
    "steps": range(1, hang.STEPS + 1),
}
BAD_HANG: dict[str, tuple[Any, str]] = {
    "ended_s": (18.5, "ended after 18.5 s, the time-out is 8 s"),
    "events": ([], "0 hangs on record"),
    "host": ("node1", f"said {SENTENCE!r}"),
    "stacks": ([1], "no stacks of rank 0"),
    "ledger": ([FIRST], "the ledger says [('failed', 'relaunch')]"),
    "steps": ([1, 2, 2], "its steps are [1, 2, 2]"),
}

AT_REST = "rank 1 on node2 is in sleep (program.py:9), without a sign of life for 10 s; 1 rank waits for it in barrier"
SCRIPT_HANG: dict[str, Any] = {
    "trial": silence.Trial(0, "sleep", 1, 3, 2),
    "events": [{"sentence": AT_REST, "ranks": [1]}],
    "ledger": [{"reason": "failed", "action": "relaunch"}, {"reason": "done", "action": "finish"}],
    "stacks": {0, 1},
}
BAD_SCRIPT_HANG: dict[str, tuple[Any, str]] = {
    "events": ([], "0 hangs on record"),
    "trial": (silence.Trial(0, "sleep", 0, 3, 2), f"said {[AT_REST]}"),
    "ledger": (SCRIPT_HANG["ledger"][:1], "the ledger says [('failed', 'relaunch')]"),
    "stacks": ({0}, "stacks of [0] only"),
}
SLOW_SCRIPT: dict[str, Any] = {"events": [], "ledger": SCRIPT_HANG["ledger"][1:], "slow_s": 36.0}
BAD_SLOW_SCRIPT: dict[str, tuple[Any, str]] = {
    "events": (SCRIPT_HANG["events"], f"a false alarm: {[AT_REST]}"),
    "ledger": ([], "the ledger says []"),
    "slow_s": (9.0, "slow for 9 s only"),
}

OLD = split_brain.Commit("checkpoint_0000008", 0, 90.0, 30.0)
NEW = split_brain.Commit("checkpoint_0000010", 1, 110.0, 30.0)
LINES = [(0, step, 80.0) for step in range(1, 9)] + [(1, step, 105.0) for step in range(9, split_brain.STEPS + 1)]
NO_ZOMBIES: dict[str, Any] = {
    "commits": [OLD, NEW],
    "metrics": LINES,
    "ledger": [("start", 0), ("end", 0), ("start", 1), ("end", 1)],
    "result_attempt": 1,
    "gone_s": 2.0,
    "digest": "a",
    "golden": "a",
}
LATE = "attempt 0's lines of steps [8] count, written after attempt 1's first"
ZOMBIES: dict[str, tuple[Any, str]] = {
    "commits": (
        [OLD._replace(time_unix_s=106.5), NEW],
        "checkpoint_0000008 got its name 1.50 s after attempt 1's first step",
    ),
    "metrics": ([*LINES[:7], (0, 8, 106.0), *LINES[8:]], LATE),
    "ledger": ([("start", 0), ("start", 1), ("end", 0)], "attempt 0 wrote to the ledger after attempt 1 had begun"),
    "result_attempt": (0, "the result is attempt 0's"),
    "gone_s": (10.5, "the old ranks were there for 10.5 s"),
    "digest": ("b", "weights b, undisturbed a"),
}


@pytest.mark.parametrize(
    ("judge", "good", "planted"),
    [
        (cancel.what_is_wrong, CANCELLED, NOT_CANCELLED),
        (hang.what_is_wrong, HANG, BAD_HANG),
        (split_brain.what_is_wrong, NO_ZOMBIES, ZOMBIES),
        (silence.what_is_wrong_with_hang, SCRIPT_HANG, BAD_SCRIPT_HANG),
        (silence.what_is_wrong_with_slowness, SLOW_SCRIPT, BAD_SLOW_SCRIPT),
    ],
    ids=["cancel", "hang", "split-brain", "script-hang", "script-healthy"],
)
def test_every_planted_violation_is_found(
    judge: Any, good: dict[str, Any], planted: dict[str, tuple[Any, str]]
) -> None:
    assert judge(**good) == []
    for name, (value, sentence) in planted.items():
        assert judge(**{**good, name: value}) == [sentence]


def test_odd_but_good_histories_pass_and_short_ones_do_not() -> None:
    by_batch = {"form": "scancel --batch", "state": "FAILED", "status": "failed"}
    assert cancel.what_is_wrong(**(CANCELLED | by_batch)) == []
    taken_back, before_the_claim = OLD._replace(time_unix_s=106.0, seen_for_s=0.1), OLD._replace(time_unix_s=101.0)
    for extra in (taken_back, before_the_claim):
        assert split_brain.what_is_wrong(**(NO_ZOMBIES | {"commits": [OLD, extra, NEW]})) == []
    assert split_brain.what_is_wrong(**(NO_ZOMBIES | {"metrics": LINES[:3]})) == ["its steps are [1, 2, 3]"]


CALM = arrays.Seen(index=0, restarts=0, requeued=0, preempted=0, is_finished=True, steps=400)
KEPT = [
    CALM,
    CALM._replace(index=1, restarts=1, preempted=1),
    CALM._replace(index=2, restarts=2, preempted=1, requeued=1),
    CALM._replace(index=3, restarts=1, preempted=1),
    CALM._replace(index=4, restarts=2, preempted=1, in_vain=1),
]


@pytest.mark.parametrize(
    ("index", "change", "problem"),
    [
        (0, {"restarts": 1}, "was restarted 1 times by 0 requeues and 0 preemptions of its own"),
        (2, {"is_finished": False}, "has no result"),
        (3, {"steps": 399}, "has 399 of 400 steps on record"),
    ],
)
def test_an_element_that_others_disturbed_is_found(index: int, change: dict[str, Any], problem: str) -> None:
    assert arrays.check(KEPT) == []
    seen = [one._replace(**change) if one.index == index else one for one in KEPT]
    assert arrays.check(seen) == [(index, problem)]


def test_an_array_that_nobody_preempted_proves_nothing() -> None:
    only_requeued = [CALM._replace(index=index, restarts=1, requeued=1) for index in range(3)]
    for seen in ([CALM], only_requeued):
        ((index, problem),) = arrays.check(seen)
        assert index == -1 and "it proves nothing" in problem


@pytest.mark.parametrize(
    ("plan", "trials", "seen", "everything"),
    [
        (cancel.plan_trials, 200, lambda trial: {trial.phase, trial.form}, {*cancel.PHASES, *cancel.FORMS}),
        (hang.plan_trials, 20, lambda trial: {trial.phase, trial.rank, trial.nodes}, {*hang.PHASES, 0, 1, 2}),
        (
            split_brain.plan_trials,
            50,
            lambda trial: {trial.mode, trial.num_ranks, trial.is_stopped},
            {*split_brain.MODES, 1, 2},
        ),
        (
            partial(silence.plan_trials, silence.HANGS),
            20,
            lambda trial: {trial.kind, trial.rank, trial.nodes},
            {*silence.HANGS, 0, 1, 2},
        ),
    ],
    ids=["cancel", "hang", "split-brain", "script-hang"],
)
def test_a_plan_is_repeatable_and_has_everything(plan: Any, trials: int, seen: Any, everything: set[Any]) -> None:
    planned = plan(seed=1, trials=trials)
    assert planned == plan(seed=1, trials=trials) != plan(seed=2, trials=trials)
    assert set().union(*map(seen, planned)) >= everything


def test_a_few_cancels_see_different_phases() -> None:
    few = cancel.plan_trials(seed=1, trials=len(cancel.PHASES))
    assert {trial.phase for trial in few} == set(cancel.PHASES)


def test_the_watch_sees_a_commit_and_the_second_one_of_its_step(tmp_path: Path) -> None:
    run, watch = RunDirectory(tmp_path), split_brain.CommitWatch()
    watch.runs.append(run)
    path = make_checkpoint(run.checkpoints, 3, attempt=0)
    watch.look()
    path.rename(tmp_path / "aside")
    watch.look()
    make_checkpoint(run.checkpoints, 3, attempt=1)
    watch.look()
    watch.look()
    commits = watch.commits(run)
    assert [(one.name[:18], one.attempt) for one in commits] == [("checkpoint_0000003", 0), ("checkpoint_0000003", 1)]
    assert commits[0].seen_for_s == 0.0 < commits[1].seen_for_s


def test_a_tally_goes_on_after_a_problem_and_takes_back_what_showed_in_the_end() -> None:
    tally = Tally()
    assert not tally.is_kept
    tally.add("first")
    assert tally.is_kept

    def fail_or_find(what: str) -> list[str]:
        if what == "second":
            raise AssertionError("not within 5 s\nand more")
        return ["lost step 8"]

    tally.try_all(["second", "third"], fail_or_find)
    tally.add("fourth", trials=3)
    tally.spoil([], trials=2)
    assert (tally.trials, tally.held, tally.is_kept) == (6, 4, False)
    assert tally.problems == ["second: AssertionError: not within 5 s", "third: lost step 8"]
    tally.spoil(["other weights"], trials=3)
    assert tally.held == 1


def test_a_storm_that_uses_the_budget_is_found() -> None:
    good = [{"attempt": number, "reason": reason} for number, reason in enumerate(("preempted", "requeued", "done"))]
    assert budgets.storm_problems(good) == []
    assert len(budgets.storm_problems([*good, {"attempt": 3, "reason": "failed"}])) == 1


def test_a_run_that_is_stopped_too_late_or_without_a_reason_is_found() -> None:
    note = "3 failures in a row without a new checkpoint: RuntimeError: no"

    def problems(*ledger: dict[str, Any]) -> int:
        return len(budgets.stop_problems(ledger, 3, reason="failed", note="3 failures in a row"))

    last = {"reason": "failed", "note": note}
    assert problems({}, {}, last) == 0
    assert problems({}, {}, {}, last) == 1
    assert problems({}, {}, {"reason": "failed", "note": f"{note}\n  File x"}) == 1
    assert problems({}, {"reason": "failed", "note": "failed"}) == 2


def test_too_many_lost_steps_are_found() -> None:
    kept, broken = {"preempted, grace": 0, "rank killed": 25}, {"preempted, grace": 1, "rank killed": 26}
    assert not any(strikes.too_much_lost(*pair) for pair in kept.items())
    assert all(strikes.too_much_lost(*pair) for pair in broken.items())


@pytest.mark.parametrize(("stopped_s", "stopped_at", "num_problems"), [(0.59, 12, 0), (0.9, 12, 1), (0.59, 13, 1)])
def test_a_stop_that_takes_more_than_two_steps_is_found(stopped_s: float, stopped_at: int, num_problems: int) -> None:
    assert len(Stop(stopped_s, stopped_s + 0.05, 10, stopped_at).problems()) == num_problems


def test_the_preflight_campaign_causes_every_code() -> None:
    missing = {*HINTS, *OTHER_CODES} - {fault.code for fault in FAULTS}
    assert not missing, "add a Fault for each to tests/campaigns/preflight_faults.py"
    assert {fault.code for fault in FAULTS} <= {*HINTS, *OTHER_CODES}
