from __future__ import annotations

import json
from typing import Any

import pytest

from slurm_train.config.changes import Change, all_changes, trained_settings, training_changes, unaccepted
from slurm_train.config.compose import compose
from slurm_train.config.overrides import apply_words
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError

CONFIG = compose(read_words(["+cluster=4x8"])).config


def changes_of(*words: str, config: RunConfig = CONFIG, global_size: int = 32) -> list[Change]:
    new = apply_words(config, words)
    return all_changes(config, new, old_global_size=32, new_global_size=global_size, trained=None)


KINDS: list[tuple[tuple[str, ...], str, str]] = [
    (("optim.lr=1e-4",), "optim.lr: 0.003 -> 0.0001", "training"),
    (("seed=3",), "seed: 0 -> 3", "training"),
    (("train.max_steps=600",), "train.max_steps: 300 -> 600", "training"),
    (("optim.betas=[0.9,0.99]",), "optim.betas: [0.9, 0.95] -> [0.9, 0.99]", "training"),
    (("model.dropout=0.1",), "model.dropout: 0.0 -> 0.1", "training"),
    (("data.context=64",), "data.context: 128 -> 64", "training"),
    (("model.width=320",), "model.width: 160 -> 320", "impossible"),
    (("model=cnn",), "model._target_: slurm_train.models.gpt.GPT -> slurm_train.models.cnn.CNN", "impossible"),
    (("train.log_every_steps=5",), "train.log_every_steps: 10 -> 5", "harmless"),
    (("checkpoint.keep=9",), "checkpoint.keep: 2 -> 9", "harmless"),
    (("requeue.enabled=false",), "requeue.enabled: true -> false", "harmless"),
    (("cluster.time_limit_min=60",), "cluster.time_limit_min: null -> 60", "harmless"),
    (("cluster=2x8",), "cluster.nodes: 4 -> 2", "harmless"),
    (("cluster=null",), "cluster: 4 nodes x 8 GPUs -> null", "harmless"),
    (("cluster.env.A=1",), "cluster.env.A: null -> 1", "harmless"),
    (("data.path=/elsewhere",), "data.path: null -> /elsewhere", "harmless"),
]


@pytest.mark.parametrize(("words", "text", "kind"), KINDS)
def test_each_change_is_said_in_one_line_and_has_its_kind(words: tuple[str, ...], text: str, kind: str) -> None:
    (change,) = changes_of(*words)
    assert (str(change), change.kind) == (text, kind)


def test_the_same_is_no_change() -> None:
    assert changes_of("optim.lr=0.003", "cluster=4x8") == []


def test_the_global_batch_counts_however_it_is_cut() -> None:
    assert changes_of("batch.local_size=2")[0].kind == "harmless"
    (change,) = [item for item in changes_of(global_size=64) if item.kind == "training"]
    assert str(change) == "batch.global_size: 32 -> 64" and "lr_retune" in change.consequence


def test_what_a_checkpoint_keeps_survives_json_and_equals_itself() -> None:
    odd = apply_words(CONFIG, ["+model.limit=.inf", "+model.sizes=[1,2]"])
    settings = trained_settings(odd, global_size=32)
    assert training_changes(json.loads(json.dumps(settings, allow_nan=False)), settings) == []


def test_a_key_of_another_version_does_not_count_but_a_users_own_does() -> None:
    settings = trained_settings(CONFIG, global_size=32)
    older = {key: value for key, value in settings.items() if key != "optim.eps"}
    assert training_changes(older, settings) == []
    (change,) = training_changes(settings, {**settings, "model.extra": 1})
    assert change.kind == "training"


ACCEPTED: list[tuple[set[str], list[str]]] = [
    (set(), ["seed", "optim.lr", "optim.eps"]),
    ({"optim.lr"}, ["seed", "optim.eps"]),
    ({"optim"}, ["seed"]),
    ({"config"}, []),
    ({"code", "data"}, ["seed", "optim.lr", "optim.eps"]),
]


@pytest.mark.parametrize(("names", "left"), ACCEPTED)
def test_names_cover_a_key_or_a_section(names: set[str], left: list[str]) -> None:
    changes = changes_of("optim.lr=1", "optim.eps=1", "seed=1", "checkpoint.keep=5")
    assert [change.key for change in unaccepted(changes, names)] == left


WRONG: list[tuple[str, str]] = [
    ("optim.lrr=1", "did you mean optim.lr"),
    ("model.widht=1", "did you mean model.width"),
    ("optim.lr=1,2", "optim.lr has several values"),
    ("optim.lr=fast", "optim.lr"),
    ("nonsense", "neither a verb nor a setting"),
]


@pytest.mark.parametrize(("word", "text"), WRONG)
def test_words_that_make_no_sense_are_named(word: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_words(CONFIG, [word])
    assert text in str(caught.value)


def test_a_cluster_keeps_what_it_had_at_another_size() -> None:
    big = apply_words(CONFIG, ["cluster.partition=big", "cluster=2x4"])
    assert big.cluster is not None
    assert (big.cluster.partition, big.cluster.nodes, big.cluster.gpus_per_node) == ("big", 2, 4)
    local = apply_words(big, ["cluster=null"])
    with pytest.raises(ConfigError, match="the run has no cluster"):
        apply_words(local, ["cluster.partition=big"])
    again: Any = apply_words(local, ["+cluster=1x2"]).cluster
    assert (again.nodes, again.gpus_per_node) == (1, 2)
