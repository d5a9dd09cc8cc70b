"""The trainer on two real gloo ranks: exactness over splits, and stopping at one boundary."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_train.metrics.writer import read_metrics
from tests.support.warm_ranks import WarmRank, start_rank

RANK_PROGRAM = Path(__file__).with_name("training_rank.py")
pytestmark = pytest.mark.distributed


def config_of(
    *, model: dict[str, Any] | None = None, batch: dict[str, Any] | None = None, **train: Any
) -> dict[str, Any]:
    return {
        "seed": 5,
        "model": {"_target_": "small_training.Net", **(model or {})},
        "data": {"_target_": "small_training.Data"},
        "batch": batch or {"global_size": 12},
        "optim": {"lr": 0.01},
        "train": {"max_steps": 20, "log_every_steps": 1, "samples_digest": True, "threads": 1, **train},
        "checkpoint": {"every_steps": None},
    }


def start(run: Path, config: dict[str, Any], *, ranks: int, attempt: int = 0) -> list[WarmRank]:
    run.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    orders = json.dumps({"run": str(run), "config": config, "port": port, "attempt": attempt})
    env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [
        start_rank(RANK_PROGRAM, orders, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def finish(processes: list[WarmRank]) -> tuple[list[int], str]:
    texts = [process.communicate(timeout=240)[1] for process in processes]
    return [process.returncode for process in processes], "".join(texts)


def run_to_end(run: Path, config: dict[str, Any], *, ranks: int, attempt: int = 0, code: int = 0) -> str:
    codes, text = finish(start(run, config, ranks=ranks, attempt=attempt))
    assert codes == [code] * ranks, text
    return text


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def result_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


SPLITS = {
    "one rank": (1, {"global_size": 12}),
    "two ranks": (2, {"global_size": 12}),
    "two ranks, three micro-batches": (2, {"global_size": 12, "accumulation": 3}),
    "one rank, four micro-batches": (1, {"global_size": 12, "accumulation": 4}),
}


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp("split") / "run" for name in SPLITS}
    for name, (ranks, batch) in SPLITS.items():
        run_to_end(runs[name], config_of(batch=batch), ranks=ranks)
    return runs


@pytest.mark.parametrize("name", list(SPLITS)[1:])
def test_losses_do_not_depend_on_the_split_of_the_batch(split_runs: dict[str, Path], name: str) -> None:
    expected, found = steps_of(split_runs["one rank"]), steps_of(split_runs[name])
    assert [line["step"] for line in found] == list(range(1, 21))
    for key in ("loss", "grad_norm"):  # losses are summed in float32
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-6)
    for key in ("samples_digest", "samples", "lr", "epoch"):
        assert [line[key] for line in found] == [line[key] for line in expected]


def test_held_out_samples_count_once_each_over_an_uneven_split(split_runs: dict[str, Path]) -> None:
    one, two = (result_of(split_runs[name]) for name in ("one rank", "two ranks"))
    # 97 samples: an accuracy over any other number of them would be another fraction.
    assert two["eval_accuracy"] == one["eval_accuracy"]
    assert one["eval_accuracy"] * 97 == pytest.approx(round(one["eval_accuracy"] * 97), abs=1e-9)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)


def test_lines_say_world_attempt_and_speed(split_runs: dict[str, Path]) -> None:
    line = steps_of(split_runs["two ranks"])[-1]
    assert (line["world_size"], line["attempt"], line["mfu"], line["tokens"]) == (2, 0, None, None)
    assert line["samples_per_s"] > 0 and line["step_time_s"] > 0 and line["data_time_s"] >= 0


# With three ranks or more the order of additions depends on where a value lies in DDP's buckets.
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (2, 4)])
def test_term_on_one_rank_stops_all_and_resuming_is_bitwise_exact(tmp_path: Path, rank: int, ranks: int) -> None:
    plain = config_of(model={"dropout": 0.2}, eval_every_steps=5)
    run_to_end(tmp_path / "whole", plain, ranks=ranks)
    once = {"dropout": 0.2, "signal_at": 7, "signal_rank": rank, "only_in": str(tmp_path / "sent")}
    cut = config_of(model=once, eval_every_steps=5)
    text = run_to_end(tmp_path / "cut", cut, ranks=ranks, code=75)
    assert "stopped at step 7" in text
    assert not (tmp_path / "cut" / "result.json").exists()
    text = run_to_end(tmp_path / "cut", cut, ranks=ranks, attempt=1)
    assert re.search(r"resuming from checkpoint_0000007_\w+ \(step 7\)", text)
    whole, resumed = result_of(tmp_path / "whole"), result_of(tmp_path / "cut")
    assert resumed["weights_digest"] == whole["weights_digest"]
    for key in ("loss", "samples_digest", "grad_norm", "lr"):
        assert [line[key] for line in steps_of(tmp_path / "cut")] == [
            line[key] for line in steps_of(tmp_path / "whole")
        ]


def test_a_stop_during_evaluation_repeats_that_evaluation_after_resuming(tmp_path: Path) -> None:
    model = {"in_evaluation": True, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    config = config_of(model=model, eval_every_steps=5)
    text = run_to_end(tmp_path / "run", config, ranks=2, code=75)
    assert "stopped at step 5" in text
    run_to_end(tmp_path / "run", config, ranks=2, attempt=1)
    evaluations = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert evaluations == [5, 10, 15, 20]
    assert [line["step"] for line in steps_of(tmp_path / "run")] == list(range(1, 21))


def test_a_run_killed_before_its_result_is_finished_by_the_next_attempt(tmp_path: Path) -> None:
    run_to_end(tmp_path / "run", config_of(), ranks=2)
    expected = result_of(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    run_to_end(tmp_path / "run", config_of(), ranks=2, attempt=1)
    changing = ("attempt", "time_unix_s")
    assert {**result_of(tmp_path / "run"), **{key: expected[key] for key in changing}} == expected


def test_a_stop_file_stops_all_ranks(tmp_path: Path) -> None:
    config = config_of(model={"step_s": 0.05}, max_steps=2000)
    processes = start(tmp_path / "run", config, ranks=2)
    deadline = time.monotonic() + 60
    while not steps_of(tmp_path / "run"):
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.05)
    (tmp_path / "run" / "STOP").touch()
    codes, text = finish(processes)
    assert codes == [75, 75], text


def test_a_loss_that_is_not_finite_is_refused_on_every_rank_before_it_is_applied(tmp_path: Path) -> None:
    config = config_of()
    config["optim"] = {"lr": 1e300, "grad_clip_norm": None}
    codes, text = finish(start(tmp_path / "run", config, ranks=2))
    assert codes == [1, 1]
    assert text.count("is not finite") == 2 and "lower optim.lr" in text
