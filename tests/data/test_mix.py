"""A mix keeps its proportions, repeats a sample of a source only after all others, and resumes as one source does."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from slurm_train.config.batch import BatchShare, cut_equally
from slurm_train.data import mix
from slurm_train.data.batches import BatchStream, GlobalBatches
from slurm_train.data.build import build_source
from slurm_train.data.check import require_readable
from slurm_train.data.mix import MixedSource
from slurm_train.data.order import Int64Array, SampleOrder
from slurm_train.data.source import Description, describe
from slurm_train.errors import ConfigError, DataError
from slurm_train.train.evaluate import measures


class Numbers:
    """Samples are their own numbers, from `start` on."""

    def __init__(self, count: int, *, start: int = 0, width: int = 1) -> None:
        self.count, self.start, self.width = count, start, width

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Int64Array) -> tuple[Tensor, ...]:
        return (torch.from_numpy(indices + self.start)[:, None].repeat(1, self.width),)

    def fingerprint(self) -> str:
        return f"{self.count} {self.start}"


def mixed(**weights: float) -> MixedSource:
    sources = {"a": Numbers(30), "b": Numbers(70, start=1000)}
    return MixedSource(sources, weights=weights or {"a": 3.0, "b": 1.0}, seed=5)


def read(source: MixedSource, *, steps: int, rank: int = 0, ranks: int = 1, start: int = 0) -> list[int]:
    batches = GlobalBatches(SampleOrder(len(source), seed=5), global_size=20)
    split = BatchShare(rank=rank, accumulation=1, shares=cut_equally(20, ranks))
    stream = BatchStream(source, batches.draws(split, start_samples=start))
    return [int(value) for _ in range(steps) for value in next(stream).tensors[0].flatten()]


def test_each_epoch_holds_the_weights_and_no_sample_comes_twice_before_all_came() -> None:
    seen = read(mixed(), steps=25)  # five epochs of 100
    for epoch in range(5):
        assert sum(value < 1000 for value in seen[100 * epoch : 100 * (epoch + 1)]) == 75
    counts = Counter(seen)
    assert {counts[value] for value in range(30)} <= {12, 13} and sum(counts[value] for value in range(30)) == 375
    assert {counts[value] for value in range(1000, 1070)} <= {1, 2}


def test_any_number_of_ranks_and_any_start_give_the_same_samples() -> None:
    source = mixed()
    whole = read(source, steps=12)
    halves = [read(source, steps=12, rank=rank, ranks=2) for rank in range(2)]
    together = [value for step in range(12) for half in halves for value in half[10 * step : 10 * step + 10]]
    assert together == whole
    assert read(source, steps=7, start=100) == whole[100:]


class Random(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number + np.random.rand()])


def test_sources_that_are_read_by_workers_give_what_they_give_without() -> None:
    def samples(num_workers: int) -> list[Tensor]:
        one = {"_target_": f"{__name__}.Random", "num_workers": num_workers}
        source = build_source(
            {
                "_target_": "slurm_train.data.mix.build",
                "_recursive_": False,
                "sources": {"x": one, "y": one},
                "seed": 1,
            },
            split="train",
            seed=1,
        )
        assert isinstance(source, MixedSource) and describe(source).draws_at_random
        batches = GlobalBatches(SampleOrder(len(source), seed=1), global_size=8)
        stream = BatchStream(source, batches.draws(BatchShare(rank=0, accumulation=1, shares=(8,)), start_samples=0))
        return [next(stream).tensors[0] for _ in range(12)]

    assert all(map(torch.equal, samples(0), samples(2)))


def test_held_out_samples_come_once_each_whatever_the_weights() -> None:
    held = mixed(a=30.0, b=70.0)
    assert held.fingerprint() != mixed().fingerprint() == mixed().fingerprint()
    assert sorted(held.batch(np.arange(100))[0].flatten().tolist()) == [*range(30), *range(1000, 1070)]


class Text(Numbers):
    """Text of which a number of bytes and of predicted tokens are known."""

    def __init__(self, count: int, *, num_bytes: int, num_targets: int) -> None:
        super().__init__(count)
        self.text = Description(num_targets=num_targets, bytes_per_target=num_bytes / num_targets)

    def describe(self) -> Description:
        return self.text


def test_bits_per_byte_of_a_mix_are_all_bits_over_all_bytes() -> None:
    """A source of one short window counts by its few tokens, not as one whole window."""
    sources = {"a": Text(1, num_bytes=12, num_targets=3), "b": Text(10, num_bytes=1000, num_targets=1000)}
    mixture = MixedSource(sources, weights={"a": 1.0, "b": 1.0}, seed=5)
    measured = measures(
        [{"loss": 1003 * math.log(2), "count": 1003.0}], bytes_per_item=describe(mixture).bytes_per_target
    )
    assert measured["eval_bits_per_byte"] == pytest.approx(1003 / 1012)
    assert describe(mixed()).bytes_per_target is None


def test_bad_mixes_are_refused() -> None:
    odd = MixedSource({"a": Numbers(30), "b": Numbers(70, width=2)}, weights={"a": 1, "b": 1}, seed=0)
    with pytest.raises(DataError, match=r"different shapes: a \[\(1,\)\], b \[\(2,\)\]"):
        odd.batch(np.arange(100))
    with pytest.raises(ConfigError, match=r"data\.sources\.x\.weight must be above 0, got 0"):
        mix.build(sources={"x": {"weight": 0}}, seed=0)
    with pytest.raises(ConfigError, match=r"data\.sources is empty"):
        mix.build(sources={}, seed=0)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (3, r"data\.sources must be a mapping, got 3"),
        (["a"], r"data\.sources must be a mapping"),
        (None, r"data\.sources is empty"),
        ({"a": 3}, r"data\.sources\.a must be a mapping, got 3"),
        ({"a": {"path": "x", "weight": "y"}}, r"data\.sources\.a\.weight must be above 0, got 'y'"),
        ({"a": {"path": "x", "weight": math.inf}}, r"data\.sources\.a\.weight must be above 0, got inf"),
    ],
)
def test_bad_mixes_are_refused_before_anything_is_submitted(sources: object, message: str, tmp_path: Path) -> None:
    data = {"_target_": "slurm_train.data.mix.build", "sources": sources}
    with pytest.raises(ConfigError, match=message):
        require_readable(data, vocab_size=None, cwd=tmp_path)


def test_settings_of_text_files_are_looked_at_before_anything_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    data = {"_target_": "slurm_train.data.text.build_packed", "path": "a.txt"}
    # Held-out samples may be another file's.
    require_readable({**data, "heldout": {"path": "b.txt"}}, vocab_size=None, cwd=tmp_path)
    for changes, message in (
        ({"collumn": "x"}, r"data\.collumn is no setting of text files"),
        ({"path": 3}, r"data\.path must be a path or a list of paths, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_readable({**data, **changes}, vocab_size=None, cwd=tmp_path)
    with pytest.raises(DataError, match="the held-out fraction is x"):
        require_readable({**data, "held_out": "x"}, vocab_size=None, cwd=tmp_path)
