"""What was typed behind a verb to choose runs, and their status, with which most verbs begin."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.errors import ConfigError
from slurm_train.rundir.lookup import root_of
from slurm_train.rundir.sweep import Element
from slurm_train.status.run_status import RunStatus, read_states
from slurm_train.status.selection import Selection, build_surveyor, read_since
from slurm_train.verbs import DEFAULT_ROOT, parse

# Attributes of parsed words that name runs, sweeps or checkpoints.
_NAMING_ATTRIBUTES = ("runs", "run", "sweep", "what", "checkpoint", "first")


def parse_runs(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """Returns what was typed behind a verb; its root is that of the runs that ids name, wherever it is typed."""
    arguments = parse(verb, words)
    find_root(arguments)
    return arguments


def find_root(arguments: argparse.Namespace) -> None:
    """Sets the root to that of the runs that ids name; a root that is typed is the only one that is looked at."""
    default = Path(DEFAULT_ROOT)
    arguments.root = Path(arguments.root)
    if arguments.root != default:
        return
    for word in _words_for_runs(arguments):
        arguments.root = root_of(split_step(word)[0], default, os.environ)
        if arguments.root != default:
            note(f"{word} is below {arguments.root}")
            return


def _words_for_runs(arguments: argparse.Namespace) -> list[str]:
    words: list[str] = []
    for name in _NAMING_ATTRIBUTES:
        value = getattr(arguments, name, None)
        if isinstance(value, str):
            words.append(value)
        elif value:
            words += value
    return words


def split_step(word: str) -> tuple[str, str]:
    """Returns run and step of a word for a checkpoint: ("gpt", "200") for "gpt@200", ("gpt", "") for "gpt".

    The folders of a path may have an @ of their own: in "/data/me@lab/runs/gpt/3f9a1c07e2d4" no step is named.
    """
    run, at, step = word.rpartition("@")
    return (run, step) if at and "/" not in step else (word, "")


def read_selection(arguments: argparse.Namespace, words: Sequence[str]) -> Selection:
    """Returns what was typed.

    Raises:
        ConfigError: a state, a number or a time that makes no sense.
    """
    if arguments.last is not None and arguments.last < 1:
        raise ConfigError(f"--last must be at least 1, got {arguments.last}", hint="write --last 5")
    return Selection(
        root=arguments.root,
        words=words,
        where=arguments.where,
        states=read_states(arguments.state, option="--state") if arguments.state is not None else None,
        last=arguments.last,
        since_unix_s=read_since(arguments.since, now_unix_s=time.time()) if arguments.since is not None else 0.0,
    )


def look_once(subjects: Sequence[Element], env: Mapping[str, str]) -> tuple[RunStatus, ...]:
    """Returns the status of runs; prints a note where Slurm does not answer and the files alone were read."""
    survey = build_surveyor(env).look(subjects)
    if survey.look.problem:
        note(f"Slurm does not answer, so this is from the files alone: {survey.look.problem}")
    return survey.statuses
