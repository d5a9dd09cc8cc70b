"""Small trainings on real gloo ranks: started, waited for, read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_train.checkpoint.load import load_tensors
from slurm_train.checkpoint.tensors import tensor_shapes
from slurm_train.checkpoint.verify import newest_verified
from slurm_train.metrics import read_metrics
from tests.support.ports import free_port
from tests.support.warm_ranks import WarmRank, start_rank

RANK_PROGRAM = Path(__file__).with_name("training_rank.py")
BASE: dict[str, Any] = {
    "seed": 5,
    "model": {"_target_": "small_training.Net"},
    "data": {"_target_": "small_training.Data"},
    "batch": {"global_size": 12},
    "optim": {"lr": 0.01},
    "train": {"max_steps": 20, "log_every_steps": 1, "samples_digest": True, "threads": 1},
    "checkpoint": {"every_steps": None},
}
PADDED = {
    "_target_": "small_training.Sequences",
    "collate": "slurm_train.data.mapstyle.pad",
    "keyed_randomness": False,
}
"""Samples of unequal lengths."""


def config_of(**sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a small training; each section is added to that of `BASE`."""
    return {**BASE, **{name: {**BASE.get(name, {}), **section} for name, section in sections.items()}}


def start(
    run: Path,
    config: dict[str, Any],
    *,
    ranks: int = 2,
    attempt: int = 0,
    fault: dict[str, Any] | None = None,
    disks: Path | None = None,
    imports: Sequence[str] = (),
) -> list[WarmRank]:
    """Starts the ranks of an attempt.

    Args:
        run: the run directory; made if absent.
        config: its configuration.
        ranks: how many.
        attempt: its number.
        fault: see `rank_faults.install`.
        disks: $NODE_DISK of rank r is the folder "node<r>" in it.
        imports: modules that the ranks find imported beside torch.
    """
    run.mkdir(parents=True, exist_ok=True)
    facts = {"run": str(run), "config": config, "port": free_port(), "attempt": attempt, "fault": fault or {}}
    env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if disks is not None:
            own["NODE_DISK"] = str(disks / f"node{rank}")
            Path(own["NODE_DISK"]).mkdir(parents=True, exist_ok=True)
        started.append(start_rank(RANK_PROGRAM, json.dumps(facts), env={**env, **own}, imports=imports))
    return started


def finish(ranks: list[WarmRank]) -> tuple[list[int], str]:
    """Waits for ranks; returns their exit codes and what they printed."""
    texts = [rank.communicate(timeout=240)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(texts)


def run_to_end(run: Path, config: dict[str, Any], *, code: int = 0, ranks: int = 2, **how: Any) -> str:
    """Runs an attempt that ends with this exit code on every rank; returns what was printed."""
    codes, text = finish(start(run, config, ranks=ranks, **how))
    assert codes == [code] * ranks, text
    return text


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of steps that count."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]


def evaluations_of(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of evaluations that count."""
    return [line for line in read_metrics(run / "metrics.jsonl") if "eval_loss" in line]


def result_of(run: Path) -> dict[str, Any]:
    """Returns result.json."""
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def digest_of(run: Path) -> str:
    """Returns the digest of the last weights."""
    return str(result_of(run)["weights_digest"])


def weights_of(run: Path) -> dict[str, Any]:
    """Returns the weights in the newest checkpoint, which is that of the last step."""
    found = newest_verified(run / "checkpoints").newest
    assert found is not None and found[1].step == steps_of(run)[-1]["step"]
    empty = {name.removeprefix("model."): t for name, t in tensor_shapes(found[0]).items() if name.startswith("model.")}
    load_tensors(found[0], {"model": empty})
    return empty


def assert_resumes_bit_for_bit(folder: Path, config: dict[str, Any], *, ranks: int = 2, **stop: int) -> str:
    """Checks that a run that is stopped and started again ends with the bits of one that is not.

    Args:
        folder: gets the runs "whole" and "cut".
        config: of both.
        ranks: how many.
        **stop: see `small_training.Net`: `signal_at`, which is 7 if not given, and `signal_rank`.

    Returns:
        What the stopped attempt and the next one printed.
    """
    whole, cut = folder / "whole", folder / "cut"
    run_to_end(whole, config, ranks=ranks)
    model = {**config["model"], "signal_at": 7, **stop, "only_in": str(folder / "sent")}
    stopped = run_to_end(cut, {**config, "model": model}, ranks=ranks, code=75)
    assert not (cut / "result.json").exists()
    resumed = run_to_end(cut, {**config, "model": model}, ranks=ranks, attempt=1)
    assert digest_of(cut) == digest_of(whole)
    assert_same_steps(cut, whole)
    return stopped + resumed


def assert_same_steps(found: Path, expected: Path, *, rel: float = 0.0) -> None:
    """Checks that two runs made the same steps of the same samples, with losses and norms that differ by `rel`."""
    ours, theirs = steps_of(found), steps_of(expected)
    assert [line["step"] for line in ours] == list(range(1, len(theirs) + 1))
    for key in ("samples_digest", "samples", "lr", "epoch"):
        assert [line[key] for line in ours] == [line[key] for line in theirs], key
    for key in ("loss", "grad_norm"):
        expected_values: Any = [line[key] for line in theirs]
        assert [line[key] for line in ours] == (pytest.approx(expected_values, rel=rel) if rel else expected_values), (
            key
        )
