"""What a person has chosen, told apart from what a run has that sets nothing."""

from __future__ import annotations

import pytest
import yaml

from slurm_train.config.compose import compose
from slurm_train.config.defaults import Setting, read_settings
from slurm_train.config.frozen import dump_config
from slurm_train.config.words import read_words

CASES = [
    ([], {}),
    (["optim.lr=1e-2", "seed=3"], {"optim.lr": 0.003, "seed": 0}),
    (["data.context=64"], {"data.context": 128}),
    (["+cluster=2x4", "cluster.partition=gpu"], {"cluster.nodes": None, "cluster.gpus_per_node": None}),
    (["data=text", "data.path=/d"], {"data.path": None}),
    (["model=cnn", "data=digits", "model.features=8"], {"model.features": 32}),
]


def settings_of(words: list[str]) -> dict[str, Setting]:
    frozen = yaml.safe_load(dump_config(compose(read_words(words)).config))
    return {setting.key: setting for setting in read_settings(frozen)}


@pytest.mark.parametrize(("words", "chosen"), CASES, ids=lambda value: " ".join(value) or "nothing")
def test_what_was_chosen_is_marked_with_its_default(words: list[str], chosen: dict[str, object]) -> None:
    found = {key: one.default for key, one in settings_of(words).items() if one.is_chosen}
    found.pop("run.name", None)
    if "cluster.partition=gpu" in words:
        assert found.pop("cluster.partition") is None
    assert found == chosen


def test_a_model_of_ones_own_is_chosen_as_a_whole() -> None:
    config = {"model": {"_target_": "mine.Net", "width": 3}, "cluster": None}
    assert [one.key for one in read_settings(config) if one.is_chosen] == ["model._target_", "model.width"]


def test_a_key_that_this_version_does_not_know_is_shown_as_chosen() -> None:
    assert read_settings({"novelty": {"x": 1}, "cluster": {}})[0] == Setting("novelty.x", 1, is_chosen=True)
