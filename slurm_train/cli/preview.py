"""What every start prints and checks first: Hydra's settings, the plan, the inputs, the code."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_train.cli.terminal import note
from slurm_train.code.job_python import python_notes, require_lasting_python
from slurm_train.code.snapshot import Source, read_source, source_notes
from slurm_train.config.schema import RunConfig, TrackSection
from slurm_train.config.words import Words
from slurm_train.errors import ConfigError
from slurm_train.plan.plan import RunPlan
from slurm_train.plan.preview import plan_rows
from slurm_train.slurm.job_variables import exported
from slurm_train.start.drift import similar_run_notes
from slurm_train.start.inputs import fetch_inputs, refuse_missing_inputs, uses_this_python
from slurm_train.start.write import require_writable

if TYPE_CHECKING:
    from slurm_train.config.hydra import HydraSettings

# Every verb that composes a configuration acts on these; --run is what happens without --multirun.
_COMPOSING = ("overrides", "search_path", "config_dir", "config_path", "config_name", "run")


def read_settings_of(flags: Words) -> HydraSettings:
    """Returns what the words and the person's own files set of Hydra itself; prints which of it is unused.

    Raises:
        ConfigError: something that cannot do here what it does under Hydra.
    """
    from slurm_train.config.hydra import read_settings

    settings = read_settings(flags)
    for text in settings.notes:
        note(text)
    return settings


def refuse_unused_flags(flags: Words, *, verb: str, used: Collection[str] = ()) -> None:
    """Refuses flags that a verb would ignore.

    Args:
        flags: what was typed.
        verb: its name.
        used: fields of `Words` that the verb acts on, besides those that say what to compose.

    Raises:
        ConfigError: another flag was typed.
    """
    for flag in fields(Words):
        if flag.name in _COMPOSING or flag.name in used or not getattr(flags, flag.name):
            continue
        typed = "after=" if flag.name == "after" else f"--{flag.name.replace('_', '-')}"
        raise ConfigError(f"`{verb}` does nothing with {typed}", hint=f"leave {typed} out")


def look_at(plan: RunPlan, *, env: Mapping[str, str], cwd: Path) -> Source:
    """Refuses what a run misses on this machine, prints its plan, and returns its code.

    Nothing is touched but the cache of the Hub.

    Args:
        plan: the run.
        env: the environment.
        cwd: the folder that the words were typed in.
    """
    require_writable(plan.run, share=plan.config.run.share)
    take_inputs(plan, cwd=cwd)
    for line in similar_run_notes(plan):
        note(line)
    print_rows(plan_rows(plan))
    warn_unexported_keys(plan.config, env)
    source = read_source(plan.run, plan.config, cwd, env=env)
    for line in source_notes(source):
        note(line)
    return source


def take_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Fetches what a run reads from the Hub, and refuses whatever else is missing; see `check_inputs`."""
    _check_tools(plan.config, cwd=cwd)
    fetch_inputs(plan, cwd=cwd, say=note)


def check_inputs(plan: RunPlan, *, cwd: Path) -> None:
    """Refuses missing data, names, packages, trackers and wrong callbacks; fetches nothing.

    Raises:
        DataError: as `refuse_missing_inputs`.
        ConfigError: as `refuse_missing_inputs` and `require_lasting_python`, a tracker is not installed, or a callback
            cannot work.
    """
    _check_tools(plan.config, cwd=cwd)
    refuse_missing_inputs(plan, cwd=cwd)


def _check_tools(config: RunConfig, *, cwd: Path) -> None:
    require_lasting_python(config)
    for line in python_notes(config, cwd, env=os.environ):
        note(line)
    # Another interpreter may have what this one lacks.
    if config.track != TrackSection() and uses_this_python(config):
        from slurm_train.tools.trackers import require_installed

        require_installed(config.track)
    if config.callbacks:
        from slurm_train.train.callbacks import check_callbacks

        # A rank's Python starts in this directory, or in the snapshot of it.
        check_callbacks(config, search=[str(cwd), *sys.path])


def warn_unexported_keys(config: RunConfig, env: Mapping[str, str]) -> None:
    """Prints which keys of trackers are set in this shell and do not travel into the job."""
    if not config.uses_cluster or config.track == TrackSection():
        return
    from slurm_train.tools.trackers import unexported_keys

    names = unexported_keys(config.track, env, exported(env, config.slurm.export))
    if names:
        note(f"{', '.join(names)} is not exported to the job; to export it: cluster.export=[{','.join(names)}]")


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Prints names and texts as two columns."""
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        note(f"  {name:<{width}}  {text}")
