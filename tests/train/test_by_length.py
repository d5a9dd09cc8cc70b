"""Batches by length in the trainer: alike on any number of ranks, exact to resume, read ahead or not."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_trainer import config_of, result_of, run_to_end, steps_of

pytestmark = pytest.mark.distributed


def by_length(global_size: int = 16, accumulation: int | None = None, **facts: Any) -> dict[str, Any]:
    batch = {"global_size": global_size, "accumulation": accumulation, "by_length": True, "pool": 4}
    config = config_of(batch=batch, **facts)
    pads = {"collate": "slurm_train.data.mapstyle.pad", "keyed_randomness": False}
    return config | {"data": {"_target_": "small_training.Sequences", **pads}}


SPLITS: dict[str, tuple[int, int | None, dict[str, int]]] = {
    "one rank": (1, None, {}),
    "two ranks": (2, None, {}),
    "two ranks, two micro-batches": (2, 2, {}),
    "sharded over two ranks": (2, None, {"dp_shard": 2}),
}


@pytest.fixture(scope="module")
def split_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {name: tmp_path_factory.mktemp("lengths") / "run" for name in SPLITS}
    for name, (ranks, accumulation, parallel) in SPLITS.items():
        run_to_end(runs[name], by_length(accumulation=accumulation) | {"parallel": parallel}, ranks=ranks)
    return runs


@pytest.mark.parametrize("name", list(SPLITS)[1:])
def test_losses_and_samples_do_not_depend_on_the_split(split_runs: dict[str, Path], name: str) -> None:
    expected, found = steps_of(split_runs["one rank"]), steps_of(split_runs[name])
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], rel=1e-6)
    for key in ("samples_digest", "samples", "lr"):
        assert [line[key] for line in found] == [line[key] for line in expected]
    assert len({late["samples"] - early["samples"] for early, late in itertools.pairwise(found)}) > 3
    assert found[3]["samples"] == 64 and found[19]["samples"] == 320, "pools end where plain batches would"
    one, other = result_of(split_runs["one rank"]), result_of(split_runs[name])
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-6)
    assert other["eval_accuracy"] == one["eval_accuracy"]


def test_resuming_is_bitwise_exact_also_with_batches_read_ahead(tmp_path: Path) -> None:
    run_to_end(tmp_path / "whole", by_length(), ranks=2)
    once = {"signal_at": 6, "signal_rank": 1, "only_in": str(tmp_path / "sent")}
    cut = by_length(model=once)
    cut["data"] |= {"prefetch": 3}
    assert "stopped at step 6" in run_to_end(tmp_path / "cut", cut, ranks=2, code=75)
    run_to_end(tmp_path / "cut", cut, ranks=2, attempt=1)
    whole, resumed = result_of(tmp_path / "whole"), result_of(tmp_path / "cut")
    assert resumed["weights_digest"] == whole["weights_digest"]
    for key in ("loss", "samples_digest", "samples"):
        assert [line[key] for line in steps_of(tmp_path / "cut")] == [
            line[key] for line in steps_of(tmp_path / "whole")
        ]
