"""What the ranks of a run execute: the built-in trainer, or a function or a script of the person.

Whoever plans, starts, watches or ends a run asks a `Program` for a fact about it, and not which of them it is. A
section of the configuration that the program does not use has its defaults in `Program.used`, which ask for nothing: a
script has no model, so nothing of it is fetched, checked or estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any

from slurm_train.config.schema import BatchSection, DdpSection, OptimSection, ParallelSection, RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the ranks execute, and what the rest of a run has to know of it."""

    name: str
    """The file, module or function that runs, e.g. "bin/train.py" or "my_package.main"; "" of the trainer."""
    short_name: str
    """Its name without folders and packages, e.g. "train" or "main"."""
    used: RunConfig
    """The configuration, with defaults in place of what this program does not use."""
    built: Mapping[str, Mapping[str, Any] | None]
    """The sections that the ranks build by their `_target_`: model and data, or a task."""
    sections: Mapping[str, Any]
    """The sections that may name code by a `_target_`: those that its ranks build, and those that it can read."""
    identity: Mapping[str, Any] | None
    """What decides what is trained; None: all keys that `frozen.NOT_IDENTITY` does not name."""
    is_planned: bool
    """Whether its global batches and steps are those of the plan. Else only the program knows them."""
    num_steps: int | None
    """Steps of the whole run; None if only the ranks know them: for epochs, or in a program of the person."""
    reports: bool
    """Whether the ranks themselves leave heartbeats from their start, and `result.json` at the end. Else they are
    watched from outside."""
    saves: bool
    """Whether it saves by `checkpoint`, and when it is asked to stop. Else it may keep checkpoints elsewhere, or
    none."""
    opens_port: bool
    """Whether it listens at MASTER_PORT of rank 0 itself. Else the rank does, at a free one of several ports."""
    wait_for_ranks_s: int
    """How long the ranks may go on when one has ended, 0: as long as they like."""
    line_start: str
    """What a line of this package begins with among the lines of the program."""
    to_train_longer: str
    """What a person types to train longer than at first; "{with}" stands for further settings."""


def program_of(config: RunConfig) -> Program:
    """Returns what the ranks of a run execute."""
    return _trainer(config) if config.task is None and config.script is None else _own_program(config)


def _trainer(config: RunConfig) -> Program:
    return Program(
        name="",
        short_name="",
        used=config,
        built={"model": config.model, "data": config.data},
        sections=_sections(config),
        identity=None,
        is_planned=True,
        num_steps=config.train.max_steps if config.train.max_epochs is None else None,
        reports=True,
        saves=True,
        opens_port=False,
        # One that outlives the others waits for them.
        wait_for_ranks_s=60,
        line_start="",
        to_train_longer="{with}train.max_steps=N --accept train.max_steps (or train.max_epochs)",
    )


def _own_program(config: RunConfig) -> Program:
    if config.script is not None:
        name, short_name = _names_of_script(config.script)
        built: dict[str, Mapping[str, Any] | None] = {}
        sections: dict[str, Any] = {}
        to_train_longer = '"script=[train.py,--epochs,6]" --accept script'
    else:
        name = str((config.task or {}).get("_target_"))
        short_name = name.rpartition(".")[2]
        built = {"task": config.task}
        # The function gets the whole configuration.
        sections = {"task": config.task, **_sections(config)}
        to_train_longer = "task.KEY=N --accept task"
    identity: dict[str, Any] = {"seed": config.seed, "task": config.task, "script": config.script}
    if config.train.follow:
        # Scorers with other names for their scores are other evaluators.
        identity["follow"] = config.train.follow
    return Program(
        name=name,
        short_name=short_name,
        used=_without_training(config),
        built=built,
        sections=sections,
        identity=identity,
        is_planned=False,
        num_steps=None,
        reports=False,
        saves=False,
        opens_port=config.script is not None,
        # It may have work of its own, e.g. the export of the model; the watch over hangs ends it if it has none.
        wait_for_ranks_s=0,
        line_start="slurm_train: ",
        to_train_longer=f"with other words, {to_train_longer}",
    )


def _sections(config: RunConfig) -> dict[str, Any]:
    return {"model": config.model, "data": config.data, "callbacks": config.callbacks, "optim": asdict(config.optim)}


def _without_training(config: RunConfig) -> RunConfig:
    """Returns the configuration as a program of the person uses it."""
    return replace(
        config,
        model=None,
        data=None,
        batch=BatchSection(),
        optim=OptimSection(),
        train=replace(config.train, compile=False, precision="auto", init_from=None),
        ddp=DdpSection(),
        parallel=ParallelSection(),
        # It is not started ahead, and may not save when it is asked to stop for more nodes.
        requeue=replace(config.requeue, warm_ranks=False, grow_every_min=None),
        callbacks=[],
    )


def _names_of_script(words: Sequence[str]) -> tuple[str, str]:
    """Returns the file, program or module that a script is, and its last part; of no words, which are refused later,
    "script"."""
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1], words[1].rpartition(".")[2]
    file = words[0] if words else "script"
    return file, PurePath(file).stem
