"""Saving while training goes on, on two real gloo ranks: the same bits, whatever the disk does."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.directory import verify
from slurm_train.metrics.writer import read_metrics
from slurm_train.rundir.events import read_saves
from slurm_train.rundir.layout import RunDirectory, list_checkpoints
from slurm_train.rundir.step_times import read_step_times
from tests.support.small_checkpoints import steps_in
from tests.support.warm_ranks import start_rank

RANK_PROGRAM = Path(__file__).with_name("training_rank.py")
pytestmark = pytest.mark.distributed
STEPS = 24


def config_of(*, model: dict[str, Any] | None = None, **checkpoint: Any) -> dict[str, Any]:
    return {
        "seed": 5,
        "model": {"_target_": "small_training.Net", "dropout": 0.2, **(model or {})},
        "data": {"_target_": "small_training.Data"},
        "batch": {"global_size": 12},
        "optim": {"lr": 0.01},
        "train": {"max_steps": STEPS, "log_every_steps": 1, "samples_digest": True, "threads": 1},
        "checkpoint": {"every_steps": 3, "keep": 20, **checkpoint},
    }


def train(run: Path, config: dict[str, Any], *, attempt: int = 0, fault: dict[str, Any] | None = None) -> Any:
    """Trains two ranks to their end; returns exit codes and what they said."""
    run.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    facts = {"run": str(run), "config": config, "port": port, "attempt": attempt, "fault": fault or {}}
    processes = [
        start_rank(
            RANK_PROGRAM,
            json.dumps(facts),
            env={**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120)[1] for process in processes]
    return [process.returncode for process in processes], "".join(texts)


def lines_of(run: Path) -> list[tuple[Any, ...]]:
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "samples_digest")) for line in lines]


def digest_of(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["weights_digest"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for each save."""
    run = tmp_path_factory.mktemp("plain") / "run"
    codes, text = train(run, config_of(background=False))
    assert codes == [0, 0], text
    return run


def test_background_saves_change_no_bit_and_every_one_verifies(plain: Path, tmp_path: Path) -> None:
    codes, text = train(tmp_path / "run", config_of())
    assert codes == [0, 0], text
    assert lines_of(tmp_path / "run") == lines_of(plain)
    assert digest_of(tmp_path / "run") == digest_of(plain)
    found = [verify(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert found == list(range(STEPS, 0, -3))
    saves = read_saves(RunDirectory(tmp_path / "run"))
    assert [save["step"] for save in saves] == list(range(3, STEPS + 1, 3))
    assert all(save["bytes"] > 0 and save["save_s"] > 0 and save["stall_s"] > 0 for save in saves)


def test_every_save_and_the_steps_of_every_rank_are_on_record(plain: Path) -> None:
    saves = read_saves(RunDirectory(plain))
    assert [save["step"] for save in saves] == list(range(3, STEPS + 1, 3))
    assert all(save["stall_s"] == save["save_s"] > 0 for save in saves)
    ranks = read_step_times(RunDirectory(plain), 0)
    # An attempt's first step is start-up.
    assert [(times.rank, times.step.num, times.data_wait.num) for times in ranks] == [
        (rank, STEPS - 1, STEPS - 1) for rank in (0, 1)
    ]


def test_a_resume_from_a_background_checkpoint_is_bitwise_equal(plain: Path, tmp_path: Path) -> None:
    """Rank 1 is killed in step 11: the save of step 6 or 9 is the last whole one, the thread may be in the next."""
    fault = {"kill_rank": 1, "kill_step": 11}
    codes, text = train(tmp_path / "run", config_of(), fault=fault)
    assert codes[1] == -9, text
    left = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert left, text
    codes, text = train(tmp_path / "run", config_of(), attempt=1)
    assert codes == [0, 0], text
    assert "resuming from checkpoint_00000" in text
    assert digest_of(tmp_path / "run") == digest_of(plain)
    assert lines_of(tmp_path / "run") == lines_of(plain)


def test_a_full_disk_in_a_periodic_save_is_said_and_training_goes_on(plain: Path, tmp_path: Path) -> None:
    codes, text = train(tmp_path / "run", config_of(), fault={"full_rank": 1, "full_step": 6})
    assert codes == [0, 0], text
    assert text.count("the checkpoint of step 6 failed, training goes on; the one before is untouched") == 1
    failed = {save["step"]: save["error"] for save in read_saves(RunDirectory(tmp_path / "run")) if "error" in save}
    assert list(failed) == [6] and "No space left" in failed[6]
    assert "rank 1 on " in text and "No space left on device" in text
    steps = [verify(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps == [step for step in range(STEPS, 0, -3) if step != 6]
    assert digest_of(tmp_path / "run") == digest_of(plain)


def test_a_full_disk_at_the_end_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    codes, text = train(tmp_path / "run", config_of(), fault={"full_rank": 1, "full_step": STEPS})
    assert codes == [1, 1], text
    assert text.count("CheckpointError: rank 1 on ") == 2
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[0].name.startswith(f"checkpoint_{STEPS - 3:07d}_")


def test_a_newer_attempt_ends_both_ranks_with_that_reason(tmp_path: Path) -> None:
    config = config_of(model={"step_s": 0.02})
    config["train"]["max_steps"] = 2000
    codes, text = train(tmp_path / "run", config, fault={"overtake_step": 6})
    assert codes == [1, 1], text
    assert text.count("RunError: ") >= 2 and "attempt 1" in text
    assert steps_in(tmp_path / "run" / "checkpoints") == [3]


def test_a_slow_save_is_waited_for_by_the_next_and_never_overtaken(plain: Path, tmp_path: Path) -> None:
    codes, text = train(tmp_path / "run", config_of(), fault={"slow_s": 0.3})
    assert codes == [0, 0], text
    steps = [verify(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert steps == list(range(STEPS, 0, -3))
    assert digest_of(tmp_path / "run") == digest_of(plain)


def test_auto_saves_at_the_same_steps_on_all_ranks_and_changes_no_bit(plain: Path, tmp_path: Path) -> None:
    codes, text = train(tmp_path / "run", config_of(every_steps="auto", failure_every_h=1e-9))
    assert codes == [0, 0], text
    assert "the next checkpoint is due in " in text
    steps = [verify(path).step for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert {10, STEPS} <= set(steps)
    assert digest_of(tmp_path / "run") == digest_of(plain)
