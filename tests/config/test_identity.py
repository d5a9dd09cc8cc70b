from __future__ import annotations

from typing import Any

import pytest

from slurm_train.config.identity import NOT_IDENTITY, config_hash, identity, run_id
from slurm_train.config.schema import RunConfig
from slurm_train.config.structure import all_keys, build_config

BASE: dict[str, Any] = {
    "model": {"_target_": "my.Model", "width": 64},
    "data": {"_target_": "my.Data"},
    "cluster": {},
    "container": {"kind": "apptainer", "image": "/image.sif"},
    "batch": {"local_size": 2, "accumulation": 1, "global_size": 64},
}
# One other value for each type of key.
OTHERS: dict[str, Any] = {
    "run.root": "elsewhere",
    "run.name": "other",
    "run.snapshot_folders": ["../other"],
    "track.wandb.mode": "offline",
    "track.wandb.tags": ["x"],
    "cluster.env": {"A": "1"},
    "cluster.launcher": "torchrun",
    "cluster.setup": ["x"],
    "cluster.export": ["X"],
    "cluster.sbatch": {"a": "1"},
    "cluster.srun": {"a": "1"},
    "optim.lr_retune": "sqrt",
    "optim.schedule": "constant",
    "optim.betas": [0.8, 0.9],
    "train.precision": "float32",
    "parallel.activation_checkpointing": "full",
    "parallel.pipeline_schedule": "gpipe",
    "parallel.gather_dtype": "bfloat16",
    "cluster.gpu_flag": "gres",
    "launch": "interactive",
    "container.kind": "pyxis",
    "container.mounts": ["/x"],
    "container.flags": ["--x"],
    "health.on_non_finite": "skip",
    "health.on_spike": "stop",
    "ddp.comm": "bf16",
    "batch.shares": "measured",
}


def variant(key: str) -> dict[str, Any]:
    """Returns the base mapping with one key set to a value that is not its default."""
    *parents, last = key.split(".")
    values: dict[str, Any] = {name: dict(part) for name, part in BASE.items()}
    holder = values
    for parent in parents:
        holder = holder.setdefault(parent, {})
    holder[last] = OTHERS.get(key, other_value(key))
    return values


def other_value(key: str) -> Any:
    hint = str(all_keys(RunConfig)[key])
    if "bool" in hint:
        return True
    return 7 if "int" in hint or "float" in hint else "other"


def hash_of(values: dict[str, Any], *, global_size: int = 64) -> str:
    return config_hash(build_config(RunConfig, values), global_size=global_size)


SECTIONS = {key.rpartition(".")[0] for key in all_keys(RunConfig) if "." in key}
# Mappings, lists, and the planned global size, which counts instead of the key: tested one by one below.
OTHERWISE = {"model", "data", "task", "script", "batch.global_size"}
LEAVES = [key for key in all_keys(RunConfig) if key not in SECTIONS | OTHERWISE]


def is_left_out(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NOT_IDENTITY)


@pytest.mark.parametrize("key", LEAVES)
def test_a_key_changes_the_run_exactly_if_it_is_not_on_the_list(key: str) -> None:
    assert (hash_of(variant(key)) == hash_of(BASE)) == is_left_out(key)


def test_every_name_on_the_list_exists() -> None:
    assert set(NOT_IDENTITY) <= set(all_keys(RunConfig))


def test_the_planned_global_batch_counts_however_it_is_cut() -> None:
    cut = {**BASE, "batch": {"local_size": 16, "accumulation": 4, "global_size": 64}}
    solved = {**BASE, "batch": {"local_size": 2}}
    assert hash_of(cut) == hash_of(BASE) == hash_of(solved)
    assert hash_of(BASE, global_size=128) != hash_of(BASE)


def test_what_is_trained_changes_the_run() -> None:
    assert hash_of({**BASE, "model": {"_target_": "my.Model", "width": 65}}) != hash_of(BASE)
    assert hash_of({**BASE, "data": {"_target_": "my.Other"}}) != hash_of(BASE)
    assert hash_of({**BASE, "seed": 1}) != hash_of(BASE)
    assert hash_of({**BASE, "optim": {"lr": 0.5}}) != hash_of(BASE)
    assert hash_of({**BASE, "train": {"max_steps": 7}}) != hash_of(BASE)


def test_the_same_run_may_continue_anywhere() -> None:
    assert hash_of({**BASE, "cluster": None}) == hash_of(BASE)
    assert hash_of({**BASE, "cluster": {"nodes": 4, "gpus_per_node": 8}}) == hash_of(BASE)


def test_a_users_own_code_is_known_by_its_words_and_the_seed() -> None:
    script = {**BASE, "script": ["train.py", "--lr", "1"]}
    assert identity(build_config(RunConfig, script), global_size=1) == {
        "seed": 0,
        "task": None,
        "script": ["train.py", "--lr", "1"],
    }
    assert hash_of(script) == hash_of({**script, "optim": {"lr": 0.5}}), "its optimizer is its own affair"
    assert hash_of(script) != hash_of({**BASE, "script": ["train.py", "--lr", "2"]})
    assert hash_of({**BASE, "task": {"_target_": "a.main"}}) != hash_of({**BASE, "task": {"_target_": "b.main"}})


def test_order_of_keys_does_not_count_and_the_id_is_twelve_hex_digits() -> None:
    swapped = {**BASE, "model": {"width": 64, "_target_": "my.Model"}}
    assert hash_of(swapped) == hash_of(BASE)
    short = run_id(build_config(RunConfig, BASE), global_size=64)
    assert short == hash_of(BASE)[:12] and len(short) == 12 and int(short, 16) >= 0
