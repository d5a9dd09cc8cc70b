"""What the ranks execute: the facts of a trainer, a task and a script, and what the latter two leave unused."""

from __future__ import annotations

import pytest

from slurm_train.config.frozen import identity
from slurm_train.config.program import program_of
from slurm_train.config.schema import RunConfig, build_config

SETTINGS = {
    "model": {"_target_": "mine.Model", "path": "org/name"},
    "data": {"_target_": "mine.Data"},
    "batch": {"global_size": 7, "growth": {"10": 2}},
    "optim": {"_target_": "mine.Optimizer"},
    "train": {"max_steps": 40, "compile": True, "precision": "fp8", "init_from": "org/weights"},
    "parallel": {"tp": 2},
    "requeue": {"warm_ranks": True},
    "callbacks": [{"_target_": "mine.Callback"}],
}


def test_the_trainer_uses_its_whole_configuration() -> None:
    config = build_config(RunConfig, SETTINGS)
    program = program_of(config)
    assert program.used == config
    assert program.num_steps == 40
    assert set(program.built) == {"model", "data"}


@pytest.mark.parametrize("words", [{"script": ["train.py"]}, {"task": {"_target_": "mine.main"}}])
def test_a_program_of_the_person_uses_nothing_that_only_the_trainer_reads(words: dict[str, object]) -> None:
    kept = {"train": {"max_steps": 40}, **words}
    program = program_of(build_config(RunConfig, {**SETTINGS, **words}))
    assert program.used == build_config(
        RunConfig, {**kept, "requeue": {"grow_every_min": None}, "train": {"max_steps": 40, "compile": False}}
    )
    assert program.num_steps is None


@pytest.mark.parametrize(
    ("words", "name", "short_name"),
    [
        ({}, "", ""),
        ({"script": ["bin/train.py", "-m"]}, "bin/train.py", "train"),
        ({"script": ["-m", "package.train"]}, "package.train", "train"),
        ({"task": {"_target_": "package.main"}}, "package.main", "main"),
    ],
)
def test_a_program_has_the_name_that_was_typed(words: dict[str, object], name: str, short_name: str) -> None:
    program = program_of(build_config(RunConfig, words))
    assert (program.name, program.short_name) == (name, short_name)


def test_settings_that_a_script_does_not_use_do_not_make_another_run() -> None:
    words = {"script": ["train.py"], "seed": 3}
    plain = identity(build_config(RunConfig, words), global_size=8)
    assert plain == {"seed": 3, "script": ["train.py"], "task": None}
    assert identity(build_config(RunConfig, {**SETTINGS, **words}), global_size=16) == plain
