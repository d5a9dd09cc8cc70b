"""config.yaml, the run's identity, and what differs between two configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.assets import asset_dir
from slurm_train.config.compose import apply_words, compose
from slurm_train.config.frozen import (
    NOT_IDENTITY,
    Change,
    all_changes,
    config_hash,
    dump_config,
    identity,
    list_settings,
    load_config,
    trained_settings,
    training_changes,
    unaccepted,
)
from slurm_train.config.schema import (
    ClusterSection,
    ContainerSection,
    Fraction,
    OptimSection,
    RunConfig,
    RunSection,
    all_keys,
    build_config,
    defaults_of,
    to_mapping,
)
from slurm_train.config.words import read_words
from slurm_train.errors import ConfigError, RunError


def round_trip(config: RunConfig, path: Path) -> RunConfig:
    path.write_text(dump_config(config), encoding="utf-8")
    return load_config(path)


def test_every_key_is_spelled_out_and_survives_the_disk(tmp_path: Path) -> None:
    config = RunConfig(
        model={"_target_": "my.Model", "layers": [1, {"x": None}], "rate": 1e-8},
        cluster=ClusterSection(gpus_per_node=[4, 2], sbatch={"exclusive": True}),
        script=["train.py", "--flag", "0o7"],
    )
    assert round_trip(config, tmp_path / "config.yaml") == config
    assert {key.partition(".")[0] for key in all_keys(RunConfig)} == set(yaml.safe_load(dump_config(config)))


printable = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))


@settings(deadline=None)
@given(env=st.dictionaries(printable, printable, max_size=3), name=printable, lr=st.floats(0, allow_nan=False))
def test_any_text_and_number_survives_the_disk(
    env: dict[str, str], name: str, lr: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "frozen_texts.yaml"
    config = RunConfig(run=RunSection(name=name), optim=OptimSection(lr=lr), cluster=ClusterSection(env=dict(env)))
    found = round_trip(config, path)
    assert found == config and found.optim.lr.hex() == lr.hex()


@pytest.mark.parametrize("text", [None, "", "- 1\n", "seed: [1\n"])
def test_a_missing_or_damaged_file_is_a_run_error(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunError, match="does not exist" if text is None else "cannot be read"):
        load_config(path)


BASE: dict[str, Any] = {
    "model": {"_target_": "my.Model", "width": 64},
    "data": {"_target_": "my.Data"},
    "cluster": {},
    "container": {"kind": "apptainer", "image": "/image.sif"},
    "batch": {"local_size": 2, "accumulation": 1, "global_size": 64},
    "optim": {"lr": 1e-3},
    "train": {"max_steps": 1000},
}


def other_than(value: Any, kind: Any) -> Any:
    """Returns a value of a type that is not this one."""
    options = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        # Neither null nor a literal that has no other value.
        usable = [option for option in options if option is not type(None) and get_args(option) != (value,)]
        return other_than(value, usable[0])
    if get_origin(kind) is Literal:
        return next(option for option in options if option != value)
    if kind in (bool, str):
        return not value if kind is bool else "other"
    if get_origin(kind) in (list, dict):
        return [other_than(None, options[0])] if get_origin(kind) is list else {"A": other_than(None, options[1])}
    return 0.7 if kind is Fraction else 7


def variant(key: str) -> dict[str, Any]:
    """Returns the base mapping with one key set to another value."""
    values: dict[str, Any] = to_mapping(build_config(RunConfig, BASE))
    *parents, last = key.split(".")
    holder = values
    for parent in parents:
        holder = holder[parent]
    holder[last] = other_than(holder[last], all_keys(RunConfig)[key])
    return values


def hash_of(values: dict[str, Any], *, global_size: int = 64) -> str:
    return config_hash(build_config(RunConfig, values), global_size=global_size)


SECTIONS = {key.rpartition(".")[0] for key in all_keys(RunConfig) if "." in key}
# Mappings, lists, and the planned global size, which counts instead of the key: tested below.
OTHERWISE = {"model", "data", "task", "script", "batch.global_size"}
LEAVES = [key for key in all_keys(RunConfig) if key not in SECTIONS | OTHERWISE]


@pytest.mark.parametrize("key", LEAVES)
def test_a_key_changes_the_run_exactly_if_it_is_not_on_the_list(key: str) -> None:
    is_left_out = any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)
    assert (hash_of(variant(key)) == hash_of(BASE)) == is_left_out


def test_what_is_trained_makes_the_run() -> None:
    cut = {"batch": {"local_size": 16, "accumulation": 4, "global_size": 64}}
    assert hash_of({**BASE, **cut, "model": {"width": 64, "_target_": "my.Model"}}) == hash_of(BASE)
    assert hash_of(BASE, global_size=128) != hash_of(BASE)
    assert hash_of({**BASE, "model": {"_target_": "my.Model", "width": 65}}) != hash_of(BASE)


def test_run_ids_stay_what_they_were() -> None:
    """Runs on disk are found by them."""
    assert hash_of(BASE)[:12] == "1ce1e8a683fa"


def test_a_users_own_code_is_known_by_its_words_and_the_seed() -> None:
    script = {**BASE, "script": ["train.py", "--lr", "1"]}
    assert set(identity(build_config(RunConfig, script), global_size=1)) == {"seed", "task", "script"}
    assert hash_of(script) == hash_of({**script, "optim": {"lr": 0.5}}), "its optimizer is its own affair"
    assert hash_of(script) != hash_of({**BASE, "script": ["train.py", "--lr", "2"]})
    assert hash_of({**BASE, "task": {"_target_": "a.main"}}) != hash_of({**BASE, "task": {"_target_": "b.main"}})


CONFIG = compose(read_words(["+cluster=4x8"])).config


def changes_of(*words: str, global_size: int = 32) -> list[Change]:
    new = apply_words(CONFIG, words)
    return all_changes(CONFIG, new, old_global_size=32, new_global_size=global_size, trained=None)


KINDS: list[tuple[tuple[str, ...], str, str]] = [
    (("optim.lr=1e-4",), "optim.lr: 0.003 -> 0.0001", "training"),
    (("model.dropout=0.1",), "model.dropout: 0.0 -> 0.1", "training"),
    (("model.width=320",), "model.width: 160 -> 320", "impossible"),
    (("cluster=null",), "cluster: 4 nodes x 8 GPUs -> null", "harmless"),
    (("data.path=/elsewhere",), "data.path: null -> /elsewhere", "harmless"),
]


@pytest.mark.parametrize(("words", "text", "kind"), KINDS)
def test_each_change_is_one_line_and_has_its_kind(words: tuple[str, ...], text: str, kind: str) -> None:
    (change,) = changes_of(*words)
    assert (str(change), change.kind) == (text, kind)


def test_the_same_is_no_change_and_the_global_batch_counts_however_it_is_cut() -> None:
    assert changes_of("optim.lr=0.003", "cluster=4x8") == []
    assert changes_of("batch.local_size=2")[0].kind == "harmless"
    (change,) = [item for item in changes_of(global_size=64) if item.kind == "training"]
    assert str(change) == "batch.global_size: 32 -> 64" and "lr_retune" in change.consequence
    changes = changes_of("optim.lr=1", "optim.eps=1", "seed=1", "checkpoint.keep=5")
    assert [change.key for change in unaccepted(changes, {"optim", "code"})] == ["seed"]
    assert unaccepted(changes, {"config"}) == []


def test_what_a_checkpoint_keeps_survives_json_and_equals_itself() -> None:
    odd = apply_words(CONFIG, ["+model.limit=.inf", "+model.sizes=[1,2]"])
    kept = trained_settings(odd, global_size=32)
    assert training_changes(json.loads(json.dumps(kept, allow_nan=False)), kept) == []


def test_a_key_of_another_version_does_not_count_but_a_users_own_does() -> None:
    kept = trained_settings(CONFIG, global_size=32)
    older = {key: value for key, value in kept.items() if key != "optim.eps"}
    assert training_changes(older, kept) == []
    (change,) = training_changes(kept, {**kept, "model.extra": 1})
    assert change.kind == "training"


def test_a_run_of_an_earlier_version_is_read_where_it_trains_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    frozen = yaml.safe_load(dump_config(CONFIG))
    frozen["ddp"] |= {"powersgd_rank": 2, "comm_start_step": 100, "average_every_steps": 8}
    frozen["batch"]["shares"] = "measured"
    del frozen["requeue"]["max_failures_without_progress"]
    frozen["requeue"]["max_fruitless_failures"] = 7
    path.write_text(yaml.safe_dump(frozen))
    expected = replace(CONFIG, requeue=replace(CONFIG.requeue, max_failures_without_progress=7))
    assert load_config(path) == expected
    for key, value in (("powersgd_rank", 4), ("comm", "powersgd")):
        changed = {**frozen, "ddp": {**frozen["ddp"], key: value}}
        path.write_text(yaml.safe_dump(changed))
        with pytest.raises(ConfigError, match=rf"ddp\.{key}"):
            load_config(path)


def test_what_was_chosen_is_marked_with_its_default() -> None:
    words = ["+cluster=2x4", "optim=sgd", "optim.momentum=0.8", "model.width=64"]
    frozen = yaml.safe_load(dump_config(compose(read_words(words)).config))
    chosen = {one.key: one.default for one in list_settings(frozen) if one.is_chosen}
    assert chosen == {"cluster.nodes": None, "cluster.gpus_per_node": None, "optim.momentum": 0.9, "model.width": 160}


def test_the_shipped_files_have_the_defaults_of_the_schema() -> None:
    """They are what `list_settings` takes for the defaults."""
    config = compose(read_words(["site=none", "+cluster=1x1"])).config
    assert config == RunConfig(model=config.model, data=config.data, site="none", cluster=ClusterSection())


@pytest.mark.parametrize("section", [OptimSection, ContainerSection], ids=["optim", "container"])
def test_the_other_files_of_a_group_say_only_what_differs(section: type[Any]) -> None:
    group = section.__name__.removesuffix("Section").lower()
    defaults = defaults_of(section)
    for path in (asset_dir("conf") / group).glob("*.yaml"):
        said = yaml.safe_load(path.read_text())
        repeated = [key for key, value in said.items() if defaults.get(key, "???") == value]
        assert path.stem == "adamw" or set(repeated) <= {"image"}, path
