from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from slurm_train.data.build import build_source, prefetch_depth
from slurm_train.data.mapstyle import MapStyleSource
from slurm_train.data.source import lengths_of
from slurm_train.errors import ConfigError, DataError

HERE = __name__


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_data", sys.modules[HERE])


class Plain(Dataset[Any]):
    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class BySplit(Plain):
    def __init__(self, split: str) -> None:
        super().__init__({"train": 8, "heldout": 3, "test": 2}[split])


def lengths(config: dict[str, Any]) -> tuple[int, int | None]:
    train, held_out = (build_source(config, split=split, seed=0) for split in ("train", "heldout"))
    assert train is not None
    return len(train), None if held_out is None else len(held_out)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"_target_": "my_data.Plain", "length": 7}, (7, None)),
        ({"_target_": "my_data.Plain", "heldout": {"length": 2}}, (5, 2)),
        ({"_target_": "my_data.Plain", "heldout": {"_target_": "my_data.BySplit", "split": "test"}}, (5, 2)),
        ({"_target_": "my_data.BySplit"}, (8, 3)),
        ({"_target_": "my_data.BySplit", "split": "train", "heldout": {"split": "test"}}, (8, 2)),
    ],
)
def test_which_samples_each_split_gets(config: dict[str, Any], expected: tuple[int, int | None]) -> None:
    assert lengths(config) == expected


def test_ways_of_reading_are_for_map_style_data_sets() -> None:
    config = {"_target_": "my_data.Plain", "collate": "torch.stack", "num_workers": 0, "keyed_randomness": False}
    source = build_source(config, split="train", seed=0)
    assert isinstance(source, MapStyleSource)
    assert source.batch(np.array([2, 1]))[0].tolist() == [2, 1]
    with pytest.raises(ConfigError, match=r"data\.num_workers is for map-style data sets"):
        build_source({"_target_": "slurm_train.data.digits.build", "num_workers": 2}, split="train", seed=0)


class Measured(Plain):
    lengths = (3, 1, 4, 1, 5)


class Wrong(Plain):
    lengths = (3.5, 1.0, 4.0, 1.0, 5.0)


def source_of(name: str, **words: Any) -> MapStyleSource:
    source = build_source({"_target_": f"my_data.{name}", **words}, split="train", seed=0)
    assert isinstance(source, MapStyleSource)
    return source


def test_lengths_are_those_that_the_data_set_says() -> None:
    assert lengths_of(source_of("Measured")).tolist() == [3, 1, 4, 1, 5]
    with pytest.raises(DataError, match="needs the lengths of samples, and MapStyleSource has none"):
        lengths_of(source_of("Plain"))
    with pytest.raises(DataError, match="lengths of samples are float64"):
        lengths_of(source_of("Wrong"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"prefetch": 2, "num_workers": 1, "keyed_randomness": False}, "both read ahead"),
        ({"prefetch": 2}, "would share its random generators with the training"),
    ],
)
def test_reading_ahead_in_a_thread_is_refused_where_it_would_disturb(words: dict[str, Any], message: str) -> None:
    undisturbed = {"prefetch": 3, "keyed_randomness": False}
    assert prefetch_depth(undisturbed, source_of("Plain", **undisturbed)) == 3
    source = source_of("Plain", **words)
    with pytest.raises(ConfigError, match=message):
        prefetch_depth({"_target_": "my_data.Plain", **words}, source)


class Batches(Plain):
    """Reads whole batches, and is not asked in which epoch."""

    def batch(self, indices: np.ndarray[Any, Any]) -> tuple[torch.Tensor, ...]:
        return (torch.from_numpy(indices),)

    def fingerprint(self) -> str:
        return "f"

    def set_epoch(self, epoch: int) -> None: ...


def test_an_epoch_that_nobody_would_set_is_refused_by_name() -> None:
    with pytest.raises(
        DataError, match="set_epoch of Batches, which reads whole batches itself, would never be called"
    ):
        source_of("Batches")


class Scaled:
    """A collate function with an argument."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, items: list[torch.Tensor]) -> torch.Tensor:
        return self.factor * torch.stack(items)


def test_collate_may_be_an_object_with_arguments() -> None:
    config: dict[str, Any] = {"_target_": "my_data.Plain", "collate": {"_target_": "my_data.Scaled", "factor": 3}}
    source = build_source(config, split="train", seed=0)
    assert source is not None
    (batch,) = source.batch(np.array([1, 4]))
    assert batch.tolist() == [3, 12]
    with pytest.raises(ConfigError, match="gave a Plain, which cannot be called"):
        build_source({**config, "collate": {"_target_": "my_data.Plain"}}, split="train", seed=0)


class Strict(Plain):
    """Knows its own splits only, in the words of torchvision."""

    def __init__(self, split: str, names: tuple[str, ...] = ("train", "val", "test")) -> None:
        if split not in names:
            raise ValueError(f"Unknown value '{split}' for argument split. Valid values are {names}.")
        super().__init__({"train": 6, "val": 3, "test": 2}[split])


@pytest.mark.parametrize(("names", "length"), [(["train", "val", "test"], 3), (["train", "test"], 2)])
def test_a_data_set_that_knows_no_heldout_is_asked_for_what_it_calls_so(names: list[str], length: int) -> None:
    notes: list[str] = []
    config: dict[str, Any] = {"_target_": "my_data.Strict", "names": names}
    source = build_source(config, split="heldout", seed=0, note=notes.append)
    assert source is not None
    assert len(source) == length
    assert notes == [f"held-out samples: split={names[1]} of my_data.Strict, which has none called heldout"]
    with pytest.raises(ConfigError, match="takes none of split=heldout, val, valid, validation, test: Unknown value"):
        build_source({**config, "names": ["train"]}, split="heldout", seed=0)
