"""Callbacks: when they are called, what a checkpoint keeps of them, and those that come with the package."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slurm_train.checkpoint.commit import Place
from slurm_train.checkpoint.load import load_rank_state, read_model
from slurm_train.checkpoint.verify import Kept, find_kept, newest_verified, read_manifest
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.data.prepare import PrepareOptions, prepare
from slurm_train.errors import ConfigError
from slurm_train.models.gpt import GPT
from slurm_train.rundir.events import AcceptedChange, record_change
from slurm_train.rundir.paths import RunDirectory, list_checkpoints, name_of
from slurm_train.rundir.scores import Score, append_score
from slurm_train.train.callbacks import BestCheckpoint, EarlyStopping, build_callbacks, check_callbacks
from slurm_train.train.continuity import EvaluationBasis
from slurm_train.train.evaluate import check_measures
from tests.support.ranks import make_rank
from tests.support.refusals import refusal
from tests.support.small_checkpoints import make_checkpoint
from tests.train.small_runs import (
    assert_same_steps,
    config_of,
    digest_of,
    evaluations_of,
    finish,
    result_of,
    run_to_end,
    start,
)
from tests.train.small_training import TINY

distributed = pytest.mark.distributed
SHIPPED = "slurm_train.train.callbacks"
EMA = {"_target_": f"{SHIPPED}.EMA", "decay": 0.9}
TELLER = {"_target_": "small_training.Teller"}


def with_callbacks(*callbacks: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {**config_of(**sections), "callbacks": list(callbacks)}


def told(run: Path, rank: int) -> list[list[Any]]:
    """Returns what `Teller` wrote on a rank: hook, step, step of the newest result."""
    return [json.loads(line) for line in (run / f"told_{rank}.jsonl").read_text().splitlines()]


def state_of(run: Path, name: str) -> dict[str, Any]:
    """Returns what the newest checkpoint has of a callback, without its tensors."""
    found = newest_verified(run / "checkpoints").newest
    assert found is not None
    state: dict[str, Any] = (load_rank_state(found[0], 0) or {})["others"][name]
    return state


def averages_of(run: Path) -> dict[str, torch.Tensor]:
    found = newest_verified(run / "checkpoints").newest
    assert found is not None
    return read_model(found[0], averaged=True)[1]


@distributed
def test_hooks_are_called_on_every_rank_at_the_same_steps_and_the_state_goes_on(tmp_path: Path) -> None:
    sections = {"train": {"eval_every_steps": 8}, "checkpoint": {"every_steps": 6}}
    once = {"signal_at": 10, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    config = with_callbacks(TELLER, {**TELLER, "also": 3}, **sections, model=once)
    run = tmp_path / "run"
    run_to_end(run, config, code=75)
    run_to_end(run, config, attempt=1)
    calls = told(run, 0)
    assert calls == told(run, 1)
    mine = [call for call in calls if call[0] == 0]
    # Both callbacks, one after the other, at each moment.
    assert [call[1:] for call in calls if call[0] == 3] == [call[1:] for call in mine]
    steps = [[0, "step_end", step, step] for step in range(1, 21)]
    expected = [
        [0, "start", 0, None],
        *steps[:6],
        [0, "save", 6, 6],
        *steps[6:8],
        [0, "evaluation", 8, 8],
        *steps[8:10],
    ]
    expected += [[0, "stop", 10, 10], [0, "save", 10, 10], [0, "start", 10, None], *steps[10:12], [0, "save", 12, 12]]
    expected += [*steps[12:16], [0, "evaluation", 16, 16], *steps[16:18], [0, "save", 18, 18], *steps[18:]]
    assert mine == [*expected, [0, "evaluation", 20, 20], [0, "end", 20, 20], [0, "save", 20, 20]]
    # The count went on: of both of the same class, each its own.
    states = [state_of(run, f"{number} small_training.Teller") for number in (0, 1)]
    assert [state["num_steps"] for state in states] == [20, 23]
    # At each save, and twice by the rules after the first step of an attempt.
    num_saves = len([call for call in mine if call[1] == "save"])
    assert [state["num_asked"] for state in states] == [num_saves + 2 * 2] * 2


@distributed
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="whole"),
        pytest.param({"parallel": {"dp_shard": 2}}, id="sharded", marks=pytest.mark.full),
    ],
)
def test_an_average_is_restored_bit_for_bit_and_leaves_no_trace_in_the_training(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    whole, cut, plain = tmp_path / "whole", tmp_path / "cut", tmp_path / "plain"
    config = with_callbacks({**EMA, "evaluate": True}, **sections, train={"eval_every_steps": 5})
    run_to_end(whole, config)
    once = {"signal_at": 7, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    stopped = {**config, "model": {**config["model"], **once}, "checkpoint": {"every_steps": 3, "background": False}}
    run_to_end(cut, stopped, code=75)
    # Then rank 0 is killed, and rank 1 with it, as the supervisor would.
    ranks = start(cut, stopped, attempt=1, fault={"kill_rank": 0, "kill_step": 14})
    finish(ranks[:1])
    ranks[1].kill()
    finish(ranks[1:])
    assert "(step 12)" in run_to_end(cut, stopped, attempt=2)
    expected, found = averages_of(whole), averages_of(cut)
    assert all(found[name].equal(average) for name, average in expected.items())
    assert state_of(cut, f"0 {EMA['_target_']}") == {"num_updates": 20, "average": {}}
    run_to_end(plain, config_of(**sections, train={"eval_every_steps": 5}))
    assert digest_of(plain) == digest_of(whole) == digest_of(cut)
    assert_same_steps(whole, plain)
    averaged, again, trained = ([line["eval_loss"] for line in evaluations_of(run)] for run in (whole, cut, plain))
    assert averaged == again and all(one > last for one, last in zip(averaged, trained, strict=True))


@distributed
@pytest.mark.parametrize(("moment", "step", "evaluated"), [("evaluation", 10, [5, 10]), ("step_end", 9, [5, 9])])
def test_ranks_agree_on_an_early_end_that_one_of_them_asks_for(
    tmp_path: Path, moment: str, step: int, evaluated: list[int]
) -> None:
    """After an evaluation at that step; after a step with the next one, which is then evaluated."""
    run, ender = tmp_path / "run", {"moment": moment, "rank": 1, "step": 8}
    config = with_callbacks({"_target_": "small_training.Ender", **ender}, train={"eval_every_steps": 5})
    assert "ended early: it is enough" in run_to_end(run, config)
    result = result_of(run)
    assert (result["step"], result["ended_early"]) == (step, "it is enough")
    assert [line["step"] for line in evaluations_of(run)] == evaluated
    assert [name_of(path).step for path in list_checkpoints(run / "checkpoints")] == [step]
    # Killed before its result: the next attempt finishes it and trains nothing.
    (run / "result.json").unlink()
    run_to_end(run, config, attempt=1)
    assert {**result_of(run), "attempt": 0, "time_unix_s": 0} == {**result, "time_unix_s": 0}


# Where periodic saves go, and the checkpoints in the run directory at the end.
@distributed
@pytest.mark.parametrize(
    ("tier", "steps"), [({}, [16, 15, 4]), ({"local_dir": "$NODE_DISK", "copy_every": 99}, [16, 10, 4])]
)
def test_a_run_ends_early_where_its_measure_stops_improving_and_the_best_checkpoint_stays(
    tmp_path: Path, tier: dict[str, Any], steps: list[int]
) -> None:
    run, once = tmp_path / "run", {"signal_at": 10, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    # The loss falls, so the first evaluation stays the best of those that ask for a high one.
    stopping = {"_target_": f"{SHIPPED}.EarlyStopping", "patience": 3, "mode": "max"}
    best = {"_target_": f"{SHIPPED}.BestCheckpoint", "mode": "max"}
    sections: dict[str, Any] = {"train": {"eval_every_steps": 4}, "checkpoint": {"every_steps": 3, "keep": 2, **tier}}
    config = with_callbacks(stopping, best, **sections, model=once)
    run_to_end(run, config, code=75, disks=tmp_path / "disks")
    run_to_end(run, config, attempt=1, disks=tmp_path / "disks")
    value = evaluations_of(run)[0]["eval_loss"]
    assert result_of(run)["step"] == 16
    reason = f"eval_loss has not improved in 3 evaluations, best {value:.4f} at step 4"
    assert result_of(run)["ended_early"] == reason
    kept = find_kept(run / "checkpoints")
    assert {name_of(entry.path).step: str(entry) for entry in kept} == {4: f"best eval_loss {value:.4f}"}
    assert [name_of(path).step for path in list_checkpoints(run / "checkpoints")] == steps


@distributed
def test_what_follows_from_an_evaluation_that_was_interrupted_at_the_end_is_in_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    stopping = {"_target_": "small_training.Stopper", "steps": [20]}
    best = {"_target_": f"{SHIPPED}.BestCheckpoint"}
    run = tmp_path / "run"
    config = with_callbacks(best, stopping, train={"eval_every_steps": 20})
    assert "stopped at step 20" in run_to_end(run, config, code=75)
    (before,) = list_checkpoints(run / "checkpoints")
    run_to_end(run, config, attempt=1)
    (last,) = list_checkpoints(run / "checkpoints")
    assert name_of(last).step == 20 and name_of(last).save_id > name_of(before).save_id
    loss = evaluations_of(run)[-1]["eval_loss"]
    assert state_of(run, f"0 {SHIPPED}.BestCheckpoint")["steps"] == [[20, loss]]
    assert find_kept(run / "checkpoints") == [Kept(last, "best eval_loss", loss, is_best=True)]
    assert not read_manifest(last).extra["evaluation_due"]


@distributed
def test_a_run_that_goes_back_to_a_checkpoint_takes_its_callbacks_back(tmp_path: Path) -> None:
    run, sections = (
        tmp_path / "run",
        {"health": {"on_non_finite": "rollback"}, "checkpoint": {"every_steps": 3, "background": False}},
    )
    text = run_to_end(run, with_callbacks(TELLER, EMA, **sections, data={"bad": [7]}))
    assert "back to step" in text
    told_steps = [call[2] for call in told(run, 1) if call[1] == "step_end"]
    assert len(told_steps) > 20 and told_steps[-1] == 20
    assert state_of(run, "0 small_training.Teller")["num_steps"] == 20
    assert state_of(run, f"0 {EMA['_target_']}")["num_updates"] == 20
    assert all(average.isfinite().all() for average in averages_of(run).values())


@distributed
def test_another_list_is_refused_until_it_is_accepted_and_what_stays_goes_on(tmp_path: Path) -> None:
    run, once = tmp_path / "run", {"signal_at": 7, "only_in": str(tmp_path / "sent")}
    first, then = [TELLER, EMA], [EMA, {**TELLER, "also": 1}]
    run_to_end(run, with_callbacks(*first, model=once), ranks=1, code=75)
    config = with_callbacks(*then, model=once)
    text = run_to_end(run, config, ranks=1, attempt=1, code=1)
    assert "is not what step 7 was trained with: callbacks: [" in text and "--accept config" in text
    record_change(RunDirectory(run), AcceptedChange(number=1, step=7, config={"callbacks": [first, then]}))
    run_to_end(run, config, ranks=1, attempt=2)
    assert state_of(run, f"0 {EMA['_target_']}")["num_updates"] == 20


LARGE = {
    # Weights of more than a kilobyte are shared out among the ranks.
    "model": {"_target_": "small_training.DoubleGPT"},
    "data": {"_target_": "small_training.Tokens"},
    "train": {"max_steps": 9},
    "checkpoint": {"every_steps": 2, "keep": 9},
}


@distributed
@pytest.mark.parametrize(("rank", "has_value"), [(0, True), (1, False)])
def test_state_of_one_rank_alone_is_saved_with_all_weights_and_given_back_there(
    tmp_path: Path, rank: int, has_value: bool
) -> None:
    table = {"_target_": "small_training.Table", "rank": rank, "has_value": has_value}
    run, config = tmp_path / "run", with_callbacks(table, **LARGE)
    codes, text = finish(start(run, config, fault={"kill_rank": 1, "kill_step": 5}))
    assert codes[1] == -9, text
    text = run_to_end(run, config, attempt=1)
    assert "resuming from checkpoint_000000" in text and "any more" not in text
    assert (run / "table").read_text().split()[0] == "9"
    assert (run / "table").read_text() == "9 9" or not has_value
    expected = {name for name, _ in GPT(**TINY).state_dict().items()}
    for path in list_checkpoints(run / "checkpoints"):
        manifest, weights = read_model(path)
        assert weights.keys() == manifest.weights.keys() == expected
        assert all(kind.startswith("float64[") for kind in manifest.weights.values())


@distributed
def test_values_that_rank_0_does_not_have_end_the_run_at_its_first_save_by_name(tmp_path: Path) -> None:
    table = {"_target_": "small_training.Table", "rank": 1, "has_value": True}
    text = run_to_end(tmp_path / "run", with_callbacks(table, **LARGE), code=1)
    name = r"callbacks.0 small_training.Table.num_steps \(a value\) is on rank 1 and not on rank 0"
    assert len(re.findall(f"RunError: .*{name}", text)) == 2, text
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


def test_an_average_is_that_of_the_formula_under_both_names_of_a_weight() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    model[1].weight = model[0].weight
    callback: Any = build_callbacks([EMA])[f"0 {EMA['_target_']}"]
    callback.attach(SimpleNamespace(model=model, rank=make_rank()))
    callback.on_start(None)
    expected = model[0].weight.detach().clone()
    for number in range(1, 101):
        torch.nn.init.normal_(model[0].weight)
        decay = min(0.9, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
        callback.on_step_end(None)
    average = callback.state_dict()["average"]
    assert list(average) == ["0.weight", "1.weight"] and average["0.weight"] is average["1.weight"]
    torch.testing.assert_close(average["0.weight"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@distributed
def test_an_average_is_the_same_in_every_layout_that_shares_out_the_model(tmp_path: Path) -> None:
    """Attempts of one run: whole, then in stages, then in columns of matrices."""
    layouts: list[dict[str, Any]] = [{}, {"pp": 2}, {"tp": 2}]
    whole, many = tmp_path / "whole", tmp_path / "many"
    model, data = {"_target_": "small_training.DoubleGPT", "tied": False}, {"_target_": "small_training.Tokens"}
    sections: dict[str, Any] = {"model": model, "data": data, "batch": {"accumulation": 2}}
    stopping = {"_target_": "small_training.Stopper", "steps": [7, 14]}
    for number, parallel in enumerate(layouts):
        degrees = {"parallel": {"dp_replicate": 1, **parallel}} if parallel else {}
        config = with_callbacks(EMA, stopping, **sections, **degrees)
        run_to_end(many, config, attempt=number, ranks=2 if parallel else 1, code=0 if number == 2 else 75)
    run_to_end(whole, with_callbacks(EMA, **sections), ranks=1)
    expected, found = averages_of(whole), averages_of(many)
    assert expected.keys() == found.keys() and len(expected) > 20
    for name, average in expected.items():
        assert found[name].numpy() == pytest.approx(average.numpy(), rel=1e-9, abs=1e-12), name


@pytest.mark.full
@distributed
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"dp_shard": 2}, id="shards"),
        pytest.param({"pp": 2}, id="stages"),
        pytest.param({"tp": 2, "sequence_parallel": True}, id="positions"),
    ],
)
def test_samples_are_written_where_a_model_can_generate_and_change_nothing(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 99)
    prepare([tmp_path / "a.txt"], out=tmp_path / "text", options=PrepareOptions(held_out=0))
    sections: dict[str, Any] = {
        "model": {"_target_": "small_training.DoubleGPT", "vocab_size": 257, "tied": False},
        "data": {"_target_": "slurm_train.data.text.build", "path": str(tmp_path / "text"), "context": 8},
        "batch": {"accumulation": 2},
        "parallel": {"dp_replicate": 1, **parallel},
    }
    samples = {"_target_": f"{SHIPPED}.TextSamples", "every_steps": 8, "prompts": ["to be", ""], "num_tokens": 5}
    run, plain = tmp_path / "run", tmp_path / "plain"
    text = run_to_end(run, with_callbacks(samples, **sections))
    if "dp_shard" not in parallel:
        assert "no text samples: they need prepared text, a model with generate, and no pp, cp or" in text
        assert not (run / "samples.jsonl").exists()
        return
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(8, "to be"), (8, ""), (16, "to be"), (16, "")]
    assert all(line["text"] for line in lines)
    run_to_end(plain, config_of(**sections))
    assert digest_of(run) == digest_of(plain)


def test_a_profile_is_written_for_its_window(tmp_path: Path) -> None:
    window = {"_target_": f"{SHIPPED}.ProfilerWindow", "start_step": 5, "steps": 2}
    run_to_end(tmp_path / "run", with_callbacks(window, {**window, "start_step": 19, "steps": 9}), ranks=1)
    profiles = sorted((tmp_path / "run" / "profiles").iterdir())
    assert [path.name for path in profiles] == [f"step_{step}_attempt_0_rank_0.json.gz" for step in (19, 5)]
    with gzip.open(profiles[1], "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") <= 2 and any("addmm" in str(name) for name in names)


# What evaluations gave, one after the other, and after which of them (from 1) the run ends.
@pytest.mark.parametrize(
    ("values", "settings", "end"),
    [
        ([3, 2, 2, 2], {"patience": 2}, 4),
        ([3, 2, 1, 2], {"patience": 2}, None),
        ([3, 2.95, 2.9], {"patience": 2, "min_delta": 0.2}, 3),
        ([1, 2, 3, 3], {"patience": 1, "mode": "max"}, 4),
        ([3, math.nan, math.nan], {"patience": 2}, 3),
    ],
)
def test_early_stopping_waits_for_its_patience(values: list[float], settings: dict[str, Any], end: int | None) -> None:
    asked, reasons, callback = list[int](), list[str](), EarlyStopping(**settings)
    for number, value in enumerate(values, start=1):
        # As after a restart: what it knows comes from its state.
        callback, before = EarlyStopping(**settings), callback
        callback.load_state_dict(before.state_dict())
        trainer: Any = SimpleNamespace(position=SimpleNamespace(step=number), end_early=reasons.append)
        callback.on_evaluation(trainer, {"eval_loss": value})
        asked += [number] if reasons else []
    assert asked == ([] if end is None else [end])


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        ({}, True),
        ({"data": "other"}, False),
        ({"num_samples": 40}, False),
        ({"averaged": True}, False),
        (None, True),
    ],
)
def test_measures_of_other_held_out_samples_or_weights_are_not_compared(
    now: dict[str, Any] | None, is_same: bool, tmp_path: Path
) -> None:
    """The best of before stays on disk by a rule of its own. What an older version saved is compared."""
    before = {"data": "f0", "num_samples": 50}
    events: list[str] = []
    position = SimpleNamespace(step=0)
    trainer: Any = SimpleNamespace(
        position=position, ask_to_save=lambda: events.append("save"), end_early=lambda _reason: events.append("end")
    )
    states: list[dict[str, Any]] = []
    for facts, values in ((before, (1.0, 1.1)), (before if now is None else before | now, (5.0, 5.0))):
        keeper, stopper = BestCheckpoint(), EarlyStopping()
        parts: Any = SimpleNamespace(measured=EvaluationBasis(**facts))
        events.clear()
        for number, callback in enumerate((keeper, stopper)):
            callback.attach(parts)
            if states:
                # An older version has not recorded what it measured.
                callback.load_state_dict(
                    {key: states[number][key] for key in states[number] if now or key != "measured"}
                )
        for value in values:
            position.step += 1
            keeper.on_evaluation(trainer, {"eval_loss": value})
            stopper.on_evaluation(trainer, {"eval_loss": value})
        states = [keeper.state_dict(), stopper.state_dict()]
    assert events == (["end"] if is_same else ["save"])
    run = RunDirectory(tmp_path / "a" / "3f9a1c07")
    run.path.mkdir(parents=True)
    paths = [make_checkpoint(run.checkpoints, step, extra={"kept": [keeper.kept_steps()]}) for step in (1, 3, 4)]
    first = Kept(paths[0], "best eval_loss" if is_same else "best eval_loss of other held-out samples", 1.0, is_same)
    assert find_kept(run.checkpoints) == ([first] if is_same else [Kept(paths[1], "best eval_loss", 5.0, True), first])


@pytest.mark.parametrize(("monitor", "best", "end"), [("eval_accuracy", 4, None), ("eval_loss", 1, 4)])
def test_what_is_better_follows_from_the_name_of_the_measure(monitor: str, best: int, end: int | None) -> None:
    """A measure that rises: an accuracy gets better and a loss gets worse."""
    keeper, stopper, ends, position = (
        BestCheckpoint(monitor=monitor),
        EarlyStopping(monitor=monitor),
        [],
        SimpleNamespace(),
    )
    trainer: Any = SimpleNamespace(
        position=position, ask_to_save=lambda: None, end_early=lambda _reason: ends.append(position.step)
    )
    for position.step, value in enumerate((0.3, 0.5, 0.6, 0.7), start=1):
        keeper.on_evaluation(trainer, {monitor: value})
        stopper.on_evaluation(trainer, {monitor: value})
    assert (keeper.steps[0][0], ends) == (best, [] if end is None else [end])


def test_the_best_are_sorted_in_and_asked_for_and_nan_is_none(tmp_path: Path) -> None:
    asked: list[int] = []
    callback, position = BestCheckpoint(keep=2), SimpleNamespace(step=0)
    trainer: Any = SimpleNamespace(position=position, ask_to_save=lambda: asked.append(position.step))
    for step, value in enumerate([3, math.nan, 2, 4, 1, 2], start=1):
        position.step = step
        callback.on_evaluation(trainer, {"eval_loss": value})
    assert asked == [1, 3, 5]
    kept = {"name": "best eval_loss", "keep": 2, "steps": [[5, 1], [3, 2], [6, 2], [1, 3], [4, 4]]}
    assert callback.kept_steps() == kept


@pytest.mark.parametrize(
    ("values", "ends"), [([3.0, 2.0, 1.0, 0.5], False), ([1.0, 2.0, 3.0, 4.0], True), ([1.0, 2.0, 3.0], False)]
)
def test_early_stopping_counts_the_scores_of_a_follower_by_step(
    tmp_path: Path, values: list[float], ends: bool
) -> None:
    """They are all in the follower's file, so an attempt that begins anew has lost none and counts none twice."""
    run = RunDirectory(tmp_path / "a" / "3f9a1c07")
    follower = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    follower.path.mkdir(parents=True)
    for step, value in reversed([*enumerate(values, start=1)]):
        append_score(follower, Score(save_id=f"{step:08x}", step=step, attempt=0, values={"eval_wiki_loss": value}))
    reasons, clock_s = list[str](), [0.0]
    place = SimpleNamespace(is_first=True)
    rank = SimpleNamespace(run=run, place=place, clock=lambda: clock_s[0])
    trainer: Any = SimpleNamespace(rank=rank, end_early=reasons.append)
    for _ in range(2):
        callback = EarlyStopping(monitor="eval_wiki_loss", follower=True)
        callback.on_evaluation(trainer, {"eval_loss": 1.0})
        callback.on_step_end(trainer)
        callback.on_step_end(trainer)
    reason = "eval_wiki_loss has not improved in 3 evaluations, best 1.0000 at step 1"
    assert reasons == ([reason, reason] if ends else []), "it looks now and then, not at each step"
    place.is_first = False
    EarlyStopping(monitor="eval_wiki_loss", follower=True).on_step_end(trainer)
    assert len(reasons) == 2 * ends


def test_the_best_by_the_scores_of_a_follower_stays_whenever_it_is_scored(tmp_path: Path) -> None:
    """A save is pruned after it is written; the score of an older one may have come in between."""
    run = RunDirectory(tmp_path / "a" / "3f9a1c07")
    follower = RunDirectory(run.path / "evaluations" / "7d434a1ed8a2")
    follower.path.mkdir(parents=True)
    callback = BestCheckpoint(monitor="eval_acc", mode="max", follower=True)
    callback.on_evaluation(SimpleNamespace(), {"eval_loss": 1.0})  # type: ignore[arg-type]  # is not used
    paths = [make_checkpoint(run.checkpoints, step, extra={"kept": [callback.kept_steps()]}) for step in (1, 2, 3)]
    for path, value in zip(paths, (0.2, 0.9, 0.1), strict=True):
        score = Score(save_id=name_of(path).save_id, step=name_of(path).step, attempt=1, values={"eval_acc": value})
        append_score(follower, score)
    assert find_kept(run.checkpoints) == [Kept(paths[1], "best eval_acc", 0.9, is_best=True)]
    Place(root=run.checkpoints, attempt=1).prune(paths[2])
    assert sorted(path.name for path in list_checkpoints(run.checkpoints)) == [paths[1].name, paths[2].name]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        ({"_target_": f"{SHIPPED}.EarlyStopping", "patience": 0}, "patience must be a whole number, at least 1, got 0"),
        ({"_target_": f"{SHIPPED}.EarlyStopping", "mode": "less"}, "mode must be min, max or auto, got 'less'"),
        ({"_target_": f"{SHIPPED}.ProfilerWindow", "ranks": 3}, "ranks must be a list, got 3"),
        ({"_target_": f"{SHIPPED}.TextSamples", "prompts": 3}, "prompts must be a list, got 3"),
        ({"_target_": f"{SHIPPED}.EMA", "decay": 1.0}, "decay must be a number, at least 0 and below 1, got 1.0"),
        ({"_target_": f"{SHIPPED}.EMA", "beta": 0.9}, "unexpected keyword argument 'beta'"),
        ({"patience": 3}, "has no _target_"),
        ({"_target_": "collections.OrderedDict"}, "callbacks[0]._target_=collections.OrderedDict gave a OrderedDict"),
    ],
)
def test_what_is_no_callback_or_has_wrong_values_is_refused(callback: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_callbacks([callback])
    assert message in error.value.message and error.value.hint


def test_a_measure_of_which_nobody_says_what_is_better_is_refused_at_the_submission_alone() -> None:
    best = {"_target_": f"{SHIPPED}.BestCheckpoint", "monitor": "eval_pck"}
    error = refusal(ConfigError, check_callbacks, build_config(RunConfig, {"callbacks": [best]}), search=[])
    assert "eval_pck" in error.message and "mode:max" in error.hint
    # A rank of a run that began before goes on with what was the default.
    (built,) = build_callbacks([best]).values()
    assert built.mode == "min"  # type: ignore[attr-defined]


def test_a_measure_that_evaluations_do_not_give_is_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)accuracy.*eval_accuracy, eval_loss"):
        EarlyStopping(monitor="accuracy").read({"eval_loss": 1.0, "eval_accuracy": 0.5})


@pytest.mark.parametrize(
    ("monitor", "names", "said"),
    [("eval_loss", None, "the data have no held-out samples"), ("val_loss", ["eval_loss"], "looks at val_loss, which")],
)
def test_what_evaluations_do_not_give_is_seen_before_the_first_step(monitor: str, names: Any, said: str) -> None:
    callbacks: Any = {"0": EarlyStopping(monitor=monitor)}
    evaluator: Any = None if names is None else SimpleNamespace(try_out=lambda: names)
    parts: Any = SimpleNamespace(model=nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=said):
        check_measures(parts, callbacks, evaluator)
    check_measures(parts, {}, evaluator)
