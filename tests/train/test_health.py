"""What follows a step that went wrong, on two real gloo ranks; the bad sample is always in rank 1's half of a batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.verify import read_manifest
from slurm_train.data.order import SampleOrder, samples_digest
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.events import append_event, read_events
from slurm_train.rundir.lineage import Origin
from slurm_train.rundir.paths import RunDirectory, list_checkpoints
from slurm_train.train.health import (
    Health,
    RecentLosses,
    position_after_rollbacks,
)
from slurm_train.train.position import Position
from slurm_train.train.step import StepFacts, StepResult
from tests.support.ranks import make_rank
from tests.train.small_runs import config_of, result_of, run_to_end, steps_of

distributed = pytest.mark.distributed
GLOBAL = 12
ORDER = SampleOrder(97, seed=5)
BAD_STEP = 5


def sample_of(step: int) -> int:
    """Returns a sample that rank 1 reads in a step (of a run that skipped nothing)."""
    return int(ORDER.indices((step - 1) * GLOBAL + 8, 1)[0])


def config_with(
    *, bad: list[int], factor: str = "nan", max_steps: int = 8, every: int | None = None, **health: Any
) -> dict[str, Any]:
    return config_of(
        data={"bad": bad, "factor": factor},
        optim={"schedule": "constant", "warmup_samples": 0},
        train={"max_steps": max_steps},
        checkpoint={"every_steps": every, "keep": 3},
        health=health,
    )


def facts_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return read_events(RunDirectory(run), kind)


def assert_reads_in_order(run: Path) -> None:
    """Each line's batch is that of its position in the run's order: none is read twice, none out of turn."""
    for line in steps_of(run):
        ids = ORDER.indices(line["samples"] - GLOBAL, GLOBAL)
        assert line["samples_digest"] == samples_digest(ids), line


@distributed
def test_skip_and_rollback_apply_the_same_batches_bit_for_bit(tmp_path: Path) -> None:
    bad = [sample_of(BAD_STEP)]
    run_to_end(tmp_path / "clean", config_with(bad=[]))
    run_to_end(tmp_path / "skip", config_with(bad=bad, on_non_finite="skip"))
    # One step less: the step that went wrong is taken again with the next batch.
    config = config_with(bad=bad, max_steps=7, every=1, on_non_finite="rollback")
    run_to_end(tmp_path / "back", config)
    skip, back, clean = (result_of(tmp_path / name) for name in ("skip", "back", "clean"))
    assert skip["weights_digest"] == back["weights_digest"] != clean["weights_digest"]
    assert (skip["step"], skip["samples"], back["step"], back["samples"]) == (8, 96, 7, 96)

    losses = [line["loss"] for line in steps_of(tmp_path / "skip")]
    assert losses[: BAD_STEP - 1] == [line["loss"] for line in steps_of(tmp_path / "clean")][: BAD_STEP - 1]
    assert losses[BAD_STEP - 1] is None
    assert losses[: BAD_STEP - 1] + losses[BAD_STEP:] == [line["loss"] for line in steps_of(tmp_path / "back")]
    for name in ("skip", "back"):
        assert_reads_in_order(tmp_path / name)

    (event,) = facts_of(tmp_path / "skip", "non_finite")
    assert (event["step"], event["samples"], event["action"], event["value"]) == (5, [48, 60], "skip", "nan")
    assert bad[0] in event["sample_ids"] and len(event["sample_ids"]) == GLOBAL
    (event,) = facts_of(tmp_path / "back", "rollback")
    assert (event["step"], event["to_step"], event["checkpoint_samples"], event["resume_samples"]) == (5, 4, 48, 60)


@distributed
@pytest.mark.parametrize("callbacks", [[], [{"_target_": "small_training.Teller"}]], ids=["none", "on_save"])
def test_a_save_is_copied_before_its_step_is_read_and_dropped_if_that_was_bad(tmp_path: Path, callbacks: Any) -> None:
    """Once the host has read its newest step, a GPU has nothing to do; so what takes the host long comes before.

    A callback that acts before saves knows the step's result by then, and may change what is copied.
    """
    config = config_with(bad=[sample_of(BAD_STEP)], max_steps=7, every=1, on_non_finite="rollback")
    late = tmp_path / "late"
    text = run_to_end(late, {**config, "callbacks": callbacks}, fault={"reads_late": True})
    expected = []
    for step in range(1, 7):
        if step == BAD_STEP:
            expected += ["reads 5, bad"] if callbacks else ["copies", "reads 5, bad"]
        expected += [f"reads {step}", "copies"] if callbacks else ["copies", f"reads {step}"]
        expected.append(f"writes {step}")
    expected += ["reads 7", "copies", "writes 7"]
    for rank in range(2):
        assert re.findall(rf"^rank {rank} (.*)$", text, re.MULTILINE) == expected
    if callbacks:
        return
    run_to_end(tmp_path / "at once", config)
    checkpoints = [list_checkpoints(run / "checkpoints") for run in (late, tmp_path / "at once")]
    for found, same in zip(*checkpoints, strict=True):
        files = [path.name for path in found.iterdir() if path.suffix in (".pt", ".distcp")]
        assert len(files) == 4
        assert all((found / name).read_bytes() == (same / name).read_bytes() for name in files)
        ours, theirs = read_manifest(found), read_manifest(same)
        assert (ours.samples, ours.extra) == (theirs.samples, theirs.extra)


@distributed
def test_a_rollback_without_a_checkpoint_stops(tmp_path: Path) -> None:
    config = config_with(bad=[sample_of(2)], on_non_finite="rollback")
    text = run_to_end(tmp_path / "run", config, code=1)
    assert text.count("step 2 went wrong and there is no checkpoint to go back to") == 2


@distributed
def test_stop_is_the_default_and_names_the_step(tmp_path: Path) -> None:
    text = run_to_end(tmp_path / "run", config_with(bad=[sample_of(BAD_STEP)]), code=1)
    assert text.count("step 5 is not finite") == 2
    assert facts_of(tmp_path / "run", "non_finite")[0]["action"] == "stop"


@distributed
@pytest.mark.parametrize("action", ["log", "skip", "stop"])
def test_a_spike_is_treated_as_asked(tmp_path: Path, action: str) -> None:
    config = config_with(
        bad=[sample_of(BAD_STEP)], factor="1e4", spike_factor=3.0, spike_window=4, on_spike=action, max_rollbacks=1
    )
    run_to_end(tmp_path / "run", config, code=1 if action == "stop" else 0)
    (event,) = facts_of(tmp_path / "run", "spike")
    assert (event["step"], event["action"]) == (BAD_STEP, action) and event["value"] > event["limit"]
    if action != "stop":
        lines = steps_of(tmp_path / "run")
        assert (lines[BAD_STEP - 1]["loss"] is None) == (action == "skip")
        assert [line["step"] for line in lines] == list(range(1, 9))


SPIKES: dict[str, Any] = {"factor": "1e4", "every": 3, "spike_factor": 3.0, "spike_window": 3, "on_spike": "rollback"}


@distributed
def test_a_spike_takes_the_run_back_and_its_data_is_passed_over(tmp_path: Path) -> None:
    """What follows is what a run sees that never had the samples in between; the spike never touched the weights."""
    run = tmp_path / "run"
    text = run_to_end(run, config_with(bad=[sample_of(BAD_STEP)], **SPIKES))
    assert "step 5: back to step 3; samples 36 to 60 are passed over" in text
    (spike,), (back,) = facts_of(run, "spike"), facts_of(run, "rollback")
    assert (spike["step"], spike["samples"], spike["action"]) == (BAD_STEP, [48, 60], "rollback")
    assert spike["value"] > spike["limit"] and sample_of(BAD_STEP) in spike["sample_ids"]
    assert (back["to_step"], back["checkpoint_samples"], back["resume_samples"]) == (3, 36, 60)
    assert [(line["step"], line["samples"]) for line in steps_of(run)] == [
        (step, 12 * step if step <= 3 else 12 * step + 24) for step in range(1, 9)
    ]
    assert_reads_in_order(run)
    # The window is the checkpoint's, so the limit of step 4 is that of its first time.
    run_to_end(tmp_path / "clean", config_with(bad=[], **SPIKES))
    losses = [line["loss"] for line in steps_of(run)]
    assert losses[:3] == [line["loss"] for line in steps_of(tmp_path / "clean")][:3]
    assert all(loss < spike["limit"] for loss in losses)


@distributed
def test_spikes_without_end_stop_the_run_after_so_many_rollbacks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Several, since the model may give the class of one of them by chance; none that comes again after step 6.
    later = {int(one) for one in ORDER.indices(6 * GLOBAL, 5 * GLOBAL)}
    halves = [int(one) for step in (4, 5, 6) for one in ORDER.indices((step - 1) * GLOBAL + 6, 6)]
    bad = [one for one in halves if one not in later]
    config = config_with(bad=bad, max_rollbacks=2, **SPIKES)
    text = run_to_end(run, config, code=1)
    assert text.count("step 4 went wrong after 2 rollbacks of this run") == 2
    assert [event["resume_samples"] for event in facts_of(run, "rollback")] == [48, 60]
    assert [event["step"] for event in facts_of(run, "spike")] == [4, 4, 4]
    more = config | {"health": {**config["health"], "max_rollbacks": 3}}
    assert "finished" in run_to_end(run, more, attempt=1), "a person may allow one more"
    assert len(facts_of(run, "rollback")) == 3
    assert_reads_in_order(run)


@distributed
def test_replicas_that_drift_apart_are_found_and_named(tmp_path: Path) -> None:
    health = {"check_replicas_every_steps": 2}
    config = config_of(model={"flip_at": 4}, train={"max_steps": 8}, health=health)
    text = run_to_end(tmp_path / "run", config, code=1)
    found = re.findall("the replicas differ at step 4: rank 1 on [^ ]+ holds other values of [a-z0-9_.]+ than", text)
    assert len(found) == 2, text
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("samples", "saved_in", "expected"),
    [(36, 0, 72), (36, 1, 60), (48, 0, 48), (0, 0, 0)],
    ids=["went back here twice", "another past, and an older version's line", "saved later", "new"],
)
def test_samples_passed_over_stay_so_after_a_resume(
    tmp_path: Path, group_of_one: None, samples: int, saved_in: int, expected: int
) -> None:
    run = RunDirectory(tmp_path)
    facts = {"step": 5, "to_step": 3, "checkpoint_samples": 36}
    append_event(run, "rollback", attempt=0, resume_samples=60, **facts)
    append_event(run, "rollback", attempt=0, resume_samples=72, saved_in=0, parent="", **facts)
    step = samples // GLOBAL
    position, origin = Position(step=step, samples=samples), Origin(step=step, save_id="c0ffee00", saved_in=saved_in)
    assert position_after_rollbacks(run, position, origin) == (expected, 2)


def test_events_are_strict_json(tmp_path: Path) -> None:
    append_event(RunDirectory(tmp_path), "spike", attempt=0, value=float("nan"), limit=float("inf"))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (events,) = tmp_path.glob("events@*.jsonl")
    json.loads(events.read_text(), parse_constant=refuse)


def empty_after(items: int, pattern: str) -> Position:
    """Judges steps, "." with an item that counts and "x" without; returns the position after the last one."""
    none: Any = None
    rank = make_rank(rank=1, ranks=2)
    health = Health(
        rank, batches=none, saver=none, resumption=none, losses=RecentLosses(rank.config.health), num_rollbacks=0
    )
    position = Position()
    position.items = items
    for step, kind in enumerate(pattern, start=1):
        has_items = kind == "."
        facts = StepFacts(step=step, samples=2 * step, lr=0.1, size=2)
        loss = 1.0 if has_items else float("nan")
        result = StepResult(facts, False, int(has_items), loss, 0, loss, applied=has_items)
        health.judge(result, position)
    return position


@pytest.mark.parametrize(("items", "pattern"), [(0, "xx." + "..x" * 20), (9, "x" * 9 + "." * 20), (9, ".x" * 60)])
def test_steps_in_which_nothing_counts_are_passed_over_and_counted(items: int, pattern: str) -> None:
    assert empty_after(items, pattern).empty_steps == pattern.count("x")


@pytest.mark.parametrize(
    ("items", "pattern", "said"),
    [
        (0, "xxx", "as in 3 of the last 3"),
        (5, "x" * 10, "as in 10 of"),
        (5, "xx." * 40, "as in 51 of"),
    ],
)
def test_too_many_steps_in_which_nothing_counts_end_the_run(items: int, pattern: str, said: str) -> None:
    with pytest.raises(SlurmTrainError, match=f"no item of step .* counts: every target is passed over, {said}"):
        empty_after(items, pattern)
